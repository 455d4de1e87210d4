// `mla_decode_packed` on CPUs; arguments and results as in packed_operator.py.
//
// A task reads a range of one row's tokens, one tile at a time: it unpacks a tile to fp32, multiplies it by the
// queries, and adds the weighted latents to its sums with the online softmax of FlashAttention (arXiv:2205.14135). The
// parts of a row are merged at the end. Steps and means of latents are folded into queries and outputs, so that a tile
// holds centered codes. Shared keys are dequantized and rotated by their position modulo `STEP`, queries back by the
// rest.
//
// A lane is one query of one head. Lanes are the innermost dimension of queries and scores, padded to full vectors, so
// no sum runs across a vector. Vectors are the extension of GCC and Clang, which any instruction set implements.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

namespace {

constexpr int64_t WIDTH = 16;  // elements of a vector
constexpr int64_t TILE = 64;   // tokens of a tile; divides STEP
constexpr int64_t STEP = 128;  // positions between two rows of the table `begins`
constexpr int64_t SHORTEST = 256;  // least tokens of a task
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

typedef float Floats __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH), aligned(4)));

Floats load(const float* from) {
  Floats value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

void store(float* to, Floats value) { std::memcpy(to, &value, sizeof(value)); }

int64_t padded(int64_t size) { return (size + WIDTH - 1) / WIDTH * WIDTH; }

// e^x, for x <= 0 within two units in the last place; 0 below -87, where the result would not be normal.
Floats exponential(Floats x) {
  const Floats low = Floats{} - 87.0f, y = x > low ? x : low;
  const Floats shifted = y * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer in the lowest bits
  const Floats n = shifted - 12582912.0f;
  const Floats r = (y - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Ints exponent = __builtin_convertvector(n, Ints) + 127;
  const Ints bits = exponent << 23;
  Floats power;
  std::memcpy(&power, &bits, sizeof(power));
  return x > low ? p * power : Floats{};
}

struct Field {
  int64_t first, count, shift;
  int32_t mask;
};

struct Call {
  int64_t batch, tokens, heads, rank, pairs, channels, lanes, stride, row_bytes, gains, latent_fields;
  std::vector<Field> fields;
  std::vector<float> step, mean;
  const uint8_t* rows;
  int64_t page_stride, row_stride, page, num_pages, capacity;
  const int32_t* pages;
  int64_t page_columns;
  const float *within, *begins, *exact;
  int64_t num_begins, num_exact;
  const int32_t* exact_starts;

  const uint8_t* row(int64_t batch_row, int64_t position) const {
    if (pages == nullptr) return rows + batch_row * page_stride + position * row_stride;
    const int64_t entry = pages[batch_row * page_columns + position / page];
    return rows + std::clamp<int64_t>(entry, 0, num_pages - 1) * page_stride + position % page * row_stride;
  }
};

// Queries of one batch row, transposed: element c of all lanes is at c * lanes. Shared keys have their real parts
// first.
struct Queries {
  std::vector<float> scaled;    // [channels, lanes]; those of shared keys belong to one value of `turn`
  std::vector<float> pairs;     // [2 * pairs, lanes], not turned
  std::vector<float> constant;  // [lanes], share of the means in every score

  Queries(const Call& call, const float* query, float scale)
      : scaled(call.channels * call.lanes), pairs(2 * call.pairs * call.lanes), constant(call.lanes) {
    for (int64_t lane = 0; lane < call.tokens * call.heads; lane++) {
      const float* element = query + lane * call.channels;
      for (int64_t c = 0; c < call.rank; c++) {
        scaled[c * call.lanes + lane] = scale * element[c] * call.step[c];
        constant[lane] += scale * element[c] * call.mean[c];
      }
      for (int64_t c = 0; c < 2 * call.pairs; c++) pairs[c * call.lanes + lane] = scale * element[call.rank + c];
    }
  }

  // Rotates the queries back by position `begin * STEP`.
  void turn(const Call& call, int64_t begin) {
    const float* cosine = call.begins + begin * call.pairs;
    const float* sine = cosine + call.num_begins * call.pairs;
    float* out = scaled.data() + call.rank * call.lanes;
    for (int64_t pair = 0; pair < call.pairs; pair++)
      for (int64_t lane = 0; lane < call.lanes; lane += WIDTH) {
        const Floats real = load(&pairs[2 * pair * call.lanes + lane]);
        const Floats imaginary = load(&pairs[(2 * pair + 1) * call.lanes + lane]);
        store(out + pair * call.lanes + lane, real * cosine[pair] + imaginary * sine[pair]);
        store(out + (call.pairs + pair) * call.lanes + lane, imaginary * cosine[pair] - real * sine[pair]);
      }
  }
};

// Buffers of a task for the row of one token, with room for whole vectors.
struct Row {
  std::vector<uint8_t> bytes;
  std::vector<float> key;  // values of the shared key, before rotation

  explicit Row(const Call& call) : bytes(call.row_bytes + WIDTH), key(2 * call.pairs + 2 * WIDTH) {}
};

// Unpacks fields to fp32, as codes less half the highest. Each is written as whole vectors, and the next one overwrites
// what is too much.
void unpack(const Field* field, const Field* end, const uint8_t* __restrict bytes, float* __restrict codes) {
  for (; field != end; codes += field->count, field++) {
    const uint8_t* packed = bytes + field->first;
    const int32_t shift = field->shift, mask = field->mask;
    const float middle = 0.5f * mask;
    for (int64_t i = 0; i < field->count; i += WIDTH)
      for (int64_t j = i; j < i + WIDTH; j++) codes[j] = static_cast<float>((packed[j] >> shift) & mask) - middle;
  }
}

// Rotates pairs `key` to a position: all real parts, then all imaginary ones.
void rotate(const Call& call, const float* __restrict key, int64_t position, float* __restrict real) {
  const float* cosine = call.within + position % STEP * call.pairs;
  const float* sine = cosine + STEP * call.pairs;
  float* __restrict imaginary = real + call.pairs;
  int64_t pair = 0;
  for (; pair + WIDTH <= call.pairs; pair += WIDTH) {
    const Floats low = load(key + 2 * pair), high = load(key + 2 * pair + WIDTH);
    const Floats x = __builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const Floats y = __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    const Floats c = load(cosine + pair), s = load(sine + pair);
    store(real + pair, x * c - y * s);
    store(imaginary + pair, x * s + y * c);
  }
  for (; pair < call.pairs; pair++) {
    real[pair] = key[2 * pair] * cosine[pair] - key[2 * pair + 1] * sine[pair];
    imaginary[pair] = key[2 * pair] * sine[pair] + key[2 * pair + 1] * cosine[pair];
  }
}

// Writes the token at `position` as the queries read it: codes of the latent, and the rotated shared key.
void read(const Call& call, int64_t batch_row, int64_t position, Row& row, float* token) {
  const int64_t begin = call.exact_starts == nullptr ? 0 : call.exact_starts[batch_row];
  const int64_t slot = position - begin, rank = call.rank;
  if (slot >= 0 && slot < call.num_exact) {
    const float* exact = call.exact + (batch_row * call.num_exact + slot) * call.channels;
    for (int64_t c = 0; c < rank; c++) token[c] = (exact[c] - call.mean[c]) / call.step[c];
    std::copy(exact + rank, exact + call.channels, row.key.data());
  } else {
    const Field *fields = call.fields.data(), *keys = fields + call.latent_fields;
    std::memcpy(row.bytes.data(), call.row(batch_row, position), call.row_bytes);
    unpack(fields, keys, row.bytes.data(), token);
    unpack(keys, fields + call.fields.size(), row.bytes.data(), row.key.data());
    const float *mean = &call.mean[rank], *step = &call.step[rank];
    for (float *key = row.key.data(), *end = key + 2 * call.pairs; key < end; key++) *key = *mean++ + *step++ * *key;
  }
  if (call.pairs) rotate(call, row.key.data(), position, token + rank);
}

// scores [tokens, lanes] = tile [tokens, channels] @ queries [channels, lanes], for N tokens and V vectors of lanes.
template <int N, int V>
void products(const Call& call, const float* tile, const float* queries, float* scores) {
  const int64_t stride = call.stride, lanes = call.lanes;
  const float *low = tile, *high = tile + N / 2 * stride, *end = queries + call.channels * lanes;
  Floats sums[N][V] = {};
  for (; queries < end; queries += lanes, low++, high++) {
    Floats query[V];
    for (int v = 0; v < V; v++) query[v] = load(queries + v * WIDTH);
    for (int n = 0; n < N; n++)
      for (int v = 0; v < V; v++) sums[n][v] += query[v] * (n < N / 2 ? low[n * stride] : high[(n - N / 2) * stride]);
  }
  for (int n = 0; n < N; n++)
    for (int v = 0; v < V; v++) store(scores + n * lanes + v * WIDTH, sums[n][v]);
}

void scores_of(const Call& call, int64_t count, const float* tile, const float* queries, float* scores) {
  for (int64_t n = 0; n < count; n += 16) {  // a tile has room for a multiple of 16 tokens
    for (int64_t lane = 0; lane < call.lanes; lane += WIDTH)
      products<16, 1>(call, tile + n * call.stride, queries + lane, scores + n * call.lanes + lane);
  }
}

// sums [L lanes, r] += weights [count, lanes]^T @ tile [count, r], for V vectors of r.
template <int L, int V>
void accumulate(const Call& call, int64_t count, const float* tile, const float* weights, float* sums, int64_t width) {
  Floats total[L][V] = {};
  for (int64_t n = 0; n < count; n++) {
    Floats token[V];
    for (int v = 0; v < V; v++) token[v] = load(tile + n * call.stride + v * WIDTH);
    for (int l = 0; l < L; l++)
      for (int v = 0; v < V; v++) total[l][v] += token[v] * weights[n * call.lanes + l];
  }
  for (int l = 0; l < L; l++)
    for (int v = 0; v < V; v++) store(sums + l * width + v * WIDTH, load(sums + l * width + v * WIDTH) + total[l][v]);
}

template <int L>
void accumulate_lanes(const Call& call, int64_t count, const float* tile, const float* weights, float* sums) {
  const int64_t width = padded(call.rank);
  int64_t c = 0;
  for (; c + 4 * WIDTH <= width; c += 4 * WIDTH) accumulate<L, 4>(call, count, tile + c, weights, sums + c, width);
  for (; c < width; c += WIDTH) accumulate<L, 1>(call, count, tile + c, weights, sums + c, width);
}

struct Range {
  int64_t start, stop;
};

// Running softmax of one task.
struct Part {
  std::vector<float> highest, total, sums;  // [lanes], [lanes], [tokens * heads, padded rank]

  explicit Part(const Call& call)
      : highest(call.lanes, LOWEST), total(call.lanes), sums(call.tokens * call.heads * padded(call.rank)) {}

  // Replaces the scores of a tile by weights, and scales the earlier sums.
  void weigh(const Call& call, int64_t count, float* scores) {
    const int64_t width = padded(call.rank), used = call.tokens * call.heads;
    std::vector<float> factors(call.lanes);
    for (int64_t lane = 0; lane < call.lanes; lane += WIDTH) {
      Floats top = load(&highest[lane]);
      for (int64_t n = 0; n < count; n++) {
        const Floats score = load(scores + n * call.lanes + lane);
        top = score > top ? score : top;
      }
      const Floats base = top > LOWEST ? top : Floats{};
      const Floats factor = exponential(load(&highest[lane]) - base);
      Floats sum = {};
      for (int64_t n = 0; n < count; n++) {
        float* score = scores + n * call.lanes + lane;
        const Floats weight = exponential(load(score) - base);
        store(score, weight);
        sum += weight;
      }
      store(&highest[lane], top);
      store(&total[lane], load(&total[lane]) * factor + sum);
      store(&factors[lane], factor);
    }
    for (int64_t lane = 0; lane < used; lane++)
      if (factors[lane] != 1.0f)
        for (float *sum = &sums[lane * width], *end = sum + width; sum < end; sum += WIDTH)
          store(sum, load(sum) * factors[lane]);
  }

  void add(const Call& call, int64_t count, const float* tile, const float* weights) {
    const int64_t width = padded(call.rank), used = call.tokens * call.heads;
    int64_t lane = 0;
    for (; lane + 5 <= used; lane += 5) accumulate_lanes<5>(call, count, tile, weights + lane, &sums[lane * width]);
    for (; lane + 4 <= used; lane += 4) accumulate_lanes<4>(call, count, tile, weights + lane, &sums[lane * width]);
    for (; lane < used; lane++) accumulate_lanes<1>(call, count, tile, weights + lane, &sums[lane * width]);
  }

  // Adds the part of later tokens.
  void merge(const Call& call, const Part& other) {
    const int64_t width = padded(call.rank);
    for (int64_t lane = 0; lane < call.tokens * call.heads; lane++) {
      const float top = std::max(highest[lane], other.highest[lane]);
      if (top == LOWEST) continue;
      const float own = std::exp(highest[lane] - top), others = std::exp(other.highest[lane] - top);
      for (int64_t c = 0; c < width; c++)
        sums[lane * width + c] = own * sums[lane * width + c] + others * other.sums[lane * width + c];
      total[lane] = own * total[lane] + others * other.total[lane];
      highest[lane] = top;
    }
  }
};

// Reads the tokens of a range for the queries of its batch row, of which each sees the positions first ... last.
void attend(const Call& call, int64_t batch_row, Range range, Queries queries, const int32_t* first,
            const int32_t* last, Part& part) {
  std::vector<float> tile((TILE + 16) * call.stride), scores((TILE + 16) * call.lanes);
  Row row(call);
  const int64_t group = call.gains ? call.heads / call.gains : 1;
  int64_t begin = -1;
  for (int64_t start = range.start; start < range.stop;) {
    const int64_t stop = std::min(range.stop, (start / TILE + 1) * TILE), count = stop - start;
    if (call.pairs && start / STEP != begin) queries.turn(call, begin = start / STEP);
    for (int64_t n = 0; n < count; n++) read(call, batch_row, start + n, row, &tile[n * call.stride]);
    scores_of(call, count, tile.data(), queries.scaled.data(), scores.data());
    for (int64_t n = 0; n < count; n++) {
      float* score = &scores[n * call.lanes];
      if (call.gains) {
        const uint8_t* gains = call.row(batch_row, start + n) + call.row_bytes;
        for (int64_t lane = 0; lane < call.tokens * call.heads; lane++) {
          c10::Half gain;
          std::memcpy(&gain, gains + lane % call.heads / group * sizeof(gain), sizeof(gain));
          score[lane] = (score[lane] + queries.constant[lane]) * static_cast<float>(gain);
        }
      }
      for (int64_t lane = 0; lane < call.lanes; lane += WIDTH) {
        Ints low, high;
        std::memcpy(&low, first + lane, sizeof(low));
        std::memcpy(&high, last + lane, sizeof(high));
        const Ints position = Ints{} + static_cast<int32_t>(start + n);
        store(score + lane, (position >= low) & (position <= high) ? load(score + lane) : Floats{} + LOWEST);
      }
    }
    part.weigh(call, count, scores.data());
    part.add(call, count, tile.data(), scores.data());
    start = stop;
  }
}

at::Tensor floats(const at::Tensor& tensor) { return tensor.to(at::kFloat).contiguous(); }

const int32_t* counts(const std::optional<at::Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<int32_t>() : nullptr;
}

std::tuple<at::Tensor, at::Tensor> mla_decode_packed(
    const at::Tensor& query, const at::Tensor& rows, const at::Tensor& step, const at::Tensor& mean, double scale,
    at::IntArrayRef fields, int64_t rank, const std::optional<at::Tensor>& within,
    const std::optional<at::Tensor>& begins, const std::optional<at::Tensor>& exact,
    const std::optional<at::Tensor>& exact_starts, const std::optional<at::Tensor>& lengths,
    const std::optional<at::Tensor>& starts, const std::optional<at::Tensor>& pages, std::optional<int64_t> window) {
  Call call{};
  call.batch = query.size(0), call.tokens = query.size(1), call.heads = query.size(2), call.channels = query.size(3);
  call.rank = rank, call.pairs = within ? (call.channels - rank) / 2 : 0;
  const int64_t used = call.tokens * call.heads;
  call.lanes = padded(used), call.stride = padded(call.channels) + WIDTH;
  const at::Tensor all_steps = floats(step), all_means = floats(mean);
  for (size_t i = 0; i + 3 < fields.size(); i += 4) {
    call.fields.push_back({fields[i], fields[i + 1], fields[i + 2], (1 << fields[i + 3]) - 1});
    call.row_bytes = std::max(call.row_bytes, fields[i] + fields[i + 1]);
    call.latent_fields += static_cast<int64_t>(call.step.size()) < rank;
    for (int64_t channel = call.step.size(), end = channel + fields[i + 1]; channel < end; channel++) {
      call.step.push_back(all_steps.const_data_ptr<float>()[channel]);
      call.mean.push_back(all_means.const_data_ptr<float>()[channel]);
    }
  }
  const int64_t element = rows.element_size();
  call.rows = static_cast<const uint8_t*>(rows.const_data_ptr());
  call.page_stride = rows.stride(0) * element, call.row_stride = rows.stride(1) * element;
  call.gains = (rows.size(2) * element - call.row_bytes) / 2;
  call.page = rows.size(1), call.num_pages = rows.size(0), call.capacity = rows.size(1);
  const at::Tensor table = pages ? pages->contiguous() : at::Tensor();
  if (pages) {
    call.pages = table.const_data_ptr<int32_t>(), call.page_columns = table.size(1);
    call.capacity = call.page * call.page_columns;
  }
  const at::Tensor near = within ? floats(*within) : at::Tensor(), far = begins ? floats(*begins) : at::Tensor();
  if (within) {
    call.within = near.const_data_ptr<float>(), call.begins = far.const_data_ptr<float>();
    call.num_begins = far.size(1);
  }
  const at::Tensor full = exact ? floats(*exact) : at::Tensor();
  if (exact) call.exact = full.const_data_ptr<float>(), call.num_exact = full.size(1);
  call.exact_starts = counts(exact_starts);

  // Visible positions of the lanes, and the range of tokens that any of them sees.
  std::vector<int32_t> first(call.batch * call.lanes), last(call.batch * call.lanes, -1);
  std::vector<Range> seen;
  for (int64_t row = 0; row < call.batch; row++) {
    const int64_t length = lengths ? std::min<int64_t>(counts(lengths)[row], call.capacity) : call.capacity;
    const int64_t start = starts ? counts(starts)[row] : 0;
    for (int64_t lane = 0; lane < used; lane++) {
      const int64_t position = length - call.tokens + lane / call.heads;
      first[row * call.lanes + lane] = std::max(start, window ? position - *window + 1 : 0);
      last[row * call.lanes + lane] = position;
    }
    seen.push_back({std::max<int64_t>(first[row * call.lanes], 0), length});
  }

  int64_t longest = 1;
  std::vector<Queries> queries;
  const at::Tensor wide = floats(query);
  for (int64_t row = 0; row < call.batch; row++) {
    longest = std::max(longest, seen[row].stop - seen[row].start);
    queries.emplace_back(call, wide.const_data_ptr<float>() + row * used * call.channels, static_cast<float>(scale));
  }
  const int64_t wanted = (2 * at::get_num_threads() + call.batch - 1) / call.batch;
  const int64_t splits = std::max<int64_t>(1, std::min(wanted, longest / SHORTEST));
  std::vector<Part> parts(call.batch * splits, Part(call));
  at::parallel_for(0, call.batch * splits, 1, [&](int64_t task, int64_t end) {
    for (; task < end; task++) {
      const int64_t row = task / splits, number = task % splits;
      const int64_t size = ((seen[row].stop - seen[row].start) / splits / TILE + 1) * TILE;
      const int64_t start = seen[row].start + number * size, stop = std::min(seen[row].stop, start + size);
      const int64_t lanes = row * call.lanes;
      if (start < stop) attend(call, row, {start, stop}, queries[row], &first[lanes], &last[lanes], parts[task]);
    }
  });

  const at::Tensor out = at::empty({call.batch, call.tokens, call.heads, rank}, at::kFloat);
  const at::Tensor lse = at::empty({call.batch, call.tokens, call.heads}, at::kFloat);
  at::parallel_for(0, call.batch, 1, [&](int64_t row, int64_t end) {
    for (; row < end; row++) {
      Part& part = parts[row * splits];
      for (int64_t number = 1; number < splits; number++) part.merge(call, parts[row * splits + number]);
      for (int64_t lane = 0; lane < used; lane++) {
        const bool sees = part.total[lane] > 0;
        const float factor = sees ? 1.0f / part.total[lane] : 0.0f, *sums = &part.sums[lane * padded(rank)];
        float* to = out.mutable_data_ptr<float>() + (row * used + lane) * rank;
        for (int64_t c = 0; c < rank; c++) to[c] = sees ? call.mean[c] + call.step[c] * sums[c] * factor : 0.0f;
        const float constant = call.gains ? 0.0f : queries[row].constant[lane];
        lse.mutable_data_ptr<float>()[row * used + lane] =
            sees ? std::log(part.total[lane]) + part.highest[lane] + constant : LOWEST;
      }
    }
  });
  return {out.to(query.scalar_type()), lse};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(surgery_cpu, library) {
  library.def(
      "mla_decode_packed(Tensor query, Tensor rows, Tensor step, Tensor mean, float scale, int[] fields, int rank, "
      "Tensor? within=None, Tensor? begins=None, Tensor? exact=None, Tensor? exact_starts=None, "
      "Tensor? lengths=None, Tensor? starts=None, Tensor? pages=None, int? window=None) -> (Tensor, Tensor)");
  library.impl("mla_decode_packed", at::kCPU, &mla_decode_packed);
}
