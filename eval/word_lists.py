"""Word lists for synthetic facts: common, short English words. The order is part of tasks and calibration texts."""

_ADJECTIVES = """
ample amused ancient angry arid austere avid aware awful awkward bald basic bitter bland 
bleak blind blond blunt bogus bold brave brief bright brisk broad bronze bulky bumpy calm careful casual cheap chilly
civil clever clumsy coarse cosmic cozy crisp crude cruel curly curved dainty damp daring decent deep dense dim dizzy
drowsy dry dull eager early easy elastic elegant empty equal exact exotic fair false famous fancy feeble fierce fluffy
foggy fond foolish fragile frail frank fresh frosty fussy gaunt gentle genuine giddy glad gloomy glossy grand greedy
grim guilty happy harsh hasty heavy hollow honest humble humid hungry idle immense jolly juicy keen kind lame lavish
lazy lean lively lofty lonely loud loyal lucid lucky lush mellow merry mighty mild modest moist muddy mute narrow naive
nasty neat nimble noble noisy novel numb oblong obscure odd ornate pale placid pleasant plump polite precise
prim proud prudent quaint quick quiet rapid rash ready rigid robust rough round rowdy rural rusty sane scarce
secret serene severe shaggy shallow sharp shiny shrill shy silent simple sincere sleepy slim slow sly smooth snug
sober soft solemn solid sour spare steady sticky stiff strict subtle sudden sullen superb supple sweet swift tame
tender tense thick thirsty tidy tiny tired tough tricky trivial urgent usual vague valid vast vivid wary weak wealthy
weary weird wicked wild wise witty worthy zany zealous
"""

_NOUNS = """
acorn agency album almond anchor ankle antler apple apron arcade armor atlas attic autumn avenue
bacon badge bagel bakery balcony bamboo banana banjo banquet barley barrel basket beacon beaver beetle bench berry
bicycle biscuit blanket blossom bonfire bottle boulder bracelet branch bridge brook broom bubble bucket buffalo bugle
bundle cabbage cabin cactus camel camera canal candle canoe canvas canyon carbon carpet carrot castle catalog cathedral
cedar celery cellar cello cement cereal chamber chapel cherry chimney chisel cider circus citizen clarinet cliff
clinic clock clover cobra coconut coffee collar comet compass copper coral cottage cotton cousin coyote cradle crater
crayon cricket crown crystal cucumber cupboard curtain cushion cyclone dagger dairy daisy dentist desert diamond diary
dolphin domino donkey dragon drawer drum duchess eagle eclipse elbow elephant elevator emerald engine envelope
fabric factory falcon farmer feather fence ferry festival fiddle flamingo flask flute forest fossil fountain fridge
furnace galaxy gallery garage garden garlic gazelle geyser giraffe glacier globe goblet gorilla granite gravel guitar
gypsum hamlet hammer hammock harbor harvest hazel hedge helmet heron hockey honey horizon hornet hospital igloo
insect island ivory jacket jaguar jasmine jelly jersey jewel jigsaw jungle juniper kayak kennel kettle kitchen
kiwi koala ladder lagoon lantern lasso lava lemon leopard letter library lilac lizard lobster locket lotus lumber
lunch magnet mammal mango mantle maple marble market marsh meadow melon mermaid meteor mineral mirror mitten monkey
monsoon mosaic mosque mountain museum mushroom mustard napkin needle nickel notebook nugget nutmeg oasis ocean octopus
olive onion opera orange orchard orchid otter oven oyster packet paddle palace pancake panther papaya paper
parade parcel parrot pasture peanut pebble pelican pencil penguin pepper perfume petal piano pickle pigeon pillow pilot
pistachio planet plaza pocket poem pollen pony poodle porch potato prairie prism pudding pumpkin puppet puzzle
pyramid quarry quartz quilt rabbit raccoon radar radish raft rainbow raven ribbon river rocket rooster ruby rudder
saddle salad salmon sandal sapphire satin saucer scarf school scooter seagull shadow shelter sheriff shovel shrimp
siren skeleton sleeve sleigh sofa spider spinach sponge spruce squirrel stable stadium statue steeple stencil
studio submarine sultan summit sunset swan tavern teapot temple tennis theater thimble thunder ticket tiger timber
toaster tobacco tomato tornado tortoise tractor trumpet tulip tundra tunnel turnip turtle tuxedo umbrella unicorn
vacuum valley vampire vanilla velvet violin volcano voyage waffle wagon walnut walrus warden weasel whale whisker
willow window winter wizard wombat yacht yogurt zebra zeppelin
"""

ADJECTIVES, NOUNS = tuple(_ADJECTIVES.split()), tuple(_NOUNS.split())
