"""Word lists for synthetic tasks: common, short English words, none a substring of another.

Scoring searches the output for the answer as a substring, which must not match inside another word.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from surgery.common.errors import SurgeryError

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

_VERBS = """
abandon absorb accuse achieve admire admit adopt advise afford agree amplify announce apologize applaud argue
arrange arrive assist assume attach attend avoid awaken balance bargain become begin behave believe belong borrow
breathe bring browse build calculate capture celebrate choose clarify collect combine compare complain confirm connect
consider consume contain convince create cultivate decide decorate defend deliver deny depend describe deserve detect
devote differ digest discuss dissolve divide donate educate emerge enjoy enrich escape evolve examine exclude exist
expand explain export fasten finish follow forbid forget forgive gather generate govern grumble guess happen hesitate
hurry identify ignore imagine imitate improve include inform inherit inspire install invent invite iterate joke
justify kneel launch learn linger listen locate maintain manage measure mention migrate multiply navigate neglect
notice obey observe obtain occupy omit organize overcome participate perceive perform persuade polish ponder postpone
practice predict prefer prepare pretend prevent proceed produce promise protect publish pursue qualify reach
recall receive recite recommend recover reduce refuse regret rejoice release remain remember remind repair replace
require rescue resist resolve respond restore reveal scatter scream search select separate shiver shout sneeze 
sparkle speak specify stretch struggle stumble succeed suffer suggest support surprise survive swallow teach tolerate
translate tremble unite utter vanish verify wander weave whisper wonder yawn yearn yell
"""
ADJECTIVES, NOUNS, VERBS = (tuple(words.split()) for words in (_ADJECTIVES, _NOUNS, _VERBS))


def draw_distinct(rng: random.Random, draw: Callable[[random.Random], str], count: int) -> list[str]:
    """Draw `count` distinct words; with an equal `rng`, a shorter list is a prefix of a longer one.

    Raises SurgeryError: `draw` has too few distinct results.
    """
    words: dict[str, None] = {}
    for _ in range(20 * count + 1000):
        if len(words) < count:
            words[draw(rng)] = None
    if len(words) == count:
        return list(words)
    raise SurgeryError(f"{count} different words are needed and only about {len(words)} exist: use a smaller length")


def adjective_noun(rng: random.Random) -> str:
    """Draw a name like "swift-maple"."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
