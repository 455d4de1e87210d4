// What the CPU kernels over packed rows share: vectors, rows in memory, a matrix product, and the online softmax of
// FlashAttention (arXiv:2205.14135) over tiles of tokens.
//
// A lane is one query of one head. Lanes are the innermost dimension of queries and scores, padded to full vectors, so
// no sum runs across a vector. Vectors are the extension of GCC and Clang, which any instruction set implements.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

namespace packed_rows {

constexpr int64_t WIDTH = 16;      // elements of a vector
constexpr int64_t TILE = 64;       // tokens of a tile; divides STEP, a multiple of BLOCK
constexpr int64_t BLOCK = 16;      // tokens that `multiply` reads together
constexpr int64_t STEP = 128;      // positions between two rows of the rotation table `begins`
constexpr int64_t SHORTEST = 256;  // least tokens of a task
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

typedef float Floats __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH), aligned(4)));

inline Floats load(const float* from) {
  Floats value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof(value)); }

inline int64_t padded(int64_t size) { return (size + WIDTH - 1) / WIDTH * WIDTH; }

inline at::Tensor floats(const at::Tensor& tensor) { return tensor.to(at::kFloat).contiguous(); }

inline const int32_t* counts(const std::optional<at::Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<int32_t>() : nullptr;
}

// e^x, for x <= 0 within two units in the last place; 0 below -87, where the result would not be normal.
inline Floats exponential(Floats x) {
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
  const Ints bits = (__builtin_convertvector(n, Ints) + 127) << 23;
  Floats power;
  std::memcpy(&power, &bits, sizeof(power));
  return x > low ? p * power : Floats{};
}

struct Field {
  int64_t first, count;
  int32_t shift, mask;
};

// Unpacks fields to fp32, as codes less half the highest. Each is written as whole vectors, and the next one overwrites
// what is too much.
inline void unpack(const Field* field, const Field* end, const uint8_t* __restrict bytes, float* __restrict codes) {
  for (; field != end; codes += field->count, field++) {
    const uint8_t* packed = bytes + field->first;
    const int32_t shift = field->shift, mask = field->mask;
    const float middle = 0.5f * mask;
    for (int64_t i = 0; i < field->count; i += WIDTH)
      for (int64_t j = i; j < i + WIDTH; j++) codes[j] = static_cast<float>((packed[j] >> shift) & mask) - middle;
  }
}

// Packed rows of one layer, and its first tokens in full precision. Tensors must outlive it.
struct Rows {
  std::vector<Field> fields;
  at::Tensor steps, means, full;
  const float *step, *mean, *exact = nullptr;
  int64_t channels = 0, row_bytes = 0, num_exact = 0, capacity, gains;

  // `fields` are (first byte, number of bytes, lowest bit, bits) of each field, as in `TokenFormat.fields`.
  Rows(const at::Tensor& rows, at::IntArrayRef flat, const at::Tensor& step, const at::Tensor& mean,
       const std::optional<at::Tensor>& exact, const std::optional<at::Tensor>& exact_starts,
       const std::optional<at::Tensor>& pages)
      : steps(floats(step)), means(floats(mean)) {
    for (size_t i = 0; i + 3 < flat.size(); i += 4) {
      fields.push_back({flat[i], flat[i + 1], static_cast<int32_t>(flat[i + 2]), (1 << flat[i + 3]) - 1});
      row_bytes = std::max(row_bytes, flat[i] + flat[i + 1]);
      channels += flat[i + 1];
    }
    this->step = steps.const_data_ptr<float>(), this->mean = means.const_data_ptr<float>();
    const int64_t element = rows.element_size();
    data = static_cast<const uint8_t*>(rows.const_data_ptr());
    page_stride = rows.stride(0) * element, row_stride = rows.stride(1) * element;
    gains = (rows.size(2) * element - row_bytes) / 2;
    page = capacity = rows.size(1), num_pages = rows.size(0);
    if (pages) {
      table = pages->contiguous();
      columns = table.size(1), capacity = page * columns, page_of = table.const_data_ptr<int32_t>();
    }
    if (exact) {
      full = floats(*exact);
      this->exact = full.const_data_ptr<float>(), num_exact = full.size(1);
    }
    starts_of_exact = counts(exact_starts);
  }

  const uint8_t* row(int64_t batch_row, int64_t position) const {
    if (page_of == nullptr) return data + batch_row * page_stride + position * row_stride;
    const int64_t entry = page_of[batch_row * columns + position / page];
    return data + std::clamp<int64_t>(entry, 0, num_pages - 1) * page_stride + position % page * row_stride;
  }

  // Returns the values of a token that is in full precision, or null.
  const float* full_precision(int64_t batch_row, int64_t position) const {
    const int64_t slot = position - (starts_of_exact == nullptr ? 0 : starts_of_exact[batch_row]);
    return slot < 0 || slot >= num_exact ? nullptr : exact + (batch_row * num_exact + slot) * channels;
  }

 private:
  at::Tensor table;
  const uint8_t* data;
  int64_t page_stride, row_stride, page, num_pages, columns = 0;
  const int32_t *page_of = nullptr, *starts_of_exact = nullptr;
};

// Rotations by positions, as in `rotation_tables`: those of 0 to STEP - 1, and of the multiples of STEP.
struct Rotations {
  at::Tensor near, far;
  const float *within, *begins;
  int64_t pairs, num_begins;

  Rotations(const at::Tensor& within, const at::Tensor& begins) : near(floats(within)), far(floats(begins)) {
    this->within = near.const_data_ptr<float>(), this->begins = far.const_data_ptr<float>();
    pairs = near.size(2), num_begins = far.size(1);
  }

  const float* cosines(int64_t position) const { return within + position % STEP * pairs; }
  const float* sines(int64_t position) const { return cosines(position) + STEP * pairs; }

  // Rotates queries back by position `begin * STEP`: parts [pairs, lanes], of which `stride` elements are a pair.
  void turn_back(int64_t begin, int64_t lanes, const float* real, const float* imaginary, int64_t stride,
                 float* real_out, float* imaginary_out) const {
    const float *cosine = begins + begin * pairs, *sine = cosine + num_begins * pairs;
    for (int64_t pair = 0; pair < pairs; pair++)
      for (int64_t lane = 0; lane < lanes; lane += WIDTH) {
        const Floats x = load(real + pair * stride + lane), y = load(imaginary + pair * stride + lane);
        store(real_out + pair * lanes + lane, x * cosine[pair] + y * sine[pair]);
        store(imaginary_out + pair * lanes + lane, y * cosine[pair] - x * sine[pair]);
      }
  }
};

// out [BLOCK tokens, one vector] = tile [BLOCK tokens, depth] @ matrix [depth, one vector].
inline void multiply_block(int64_t depth, const float* tile, int64_t stride, const float* matrix, int64_t width,
                           float* out, int64_t out_stride) {
  const float *low = tile, *high = tile + BLOCK / 2 * stride, *end = matrix + depth * width;
  Floats sums[BLOCK] = {};
  for (; matrix < end; matrix += width, low++, high++) {
    const Floats column = load(matrix);
    for (int64_t n = 0; n < BLOCK / 2; n++) {
      sums[n] += column * low[n * stride];
      sums[n + BLOCK / 2] += column * high[n * stride];
    }
  }
  for (int64_t n = 0; n < BLOCK; n++) store(out + n * out_stride, sums[n]);
}

// out [count, width] = tile [count, depth] @ matrix [depth, width]; both have room for a multiple of BLOCK tokens.
inline void multiply(int64_t count, int64_t depth, const float* tile, int64_t stride, const float* matrix,
                     int64_t width, float* out, int64_t out_stride) {
  for (int64_t n = 0; n < count; n += BLOCK)
    for (int64_t v = 0; v < width; v += WIDTH)
      multiply_block(depth, tile + n * stride, stride, matrix + v, width, out + n * out_stride + v, out_stride);
}

// Visible positions of each lane of each batch row: from the row's start to `last`; none for lanes that only pad a vector.
struct Visible {
  struct Range {
    int64_t start, stop;
  };

  int64_t lanes;
  std::vector<int32_t> last;
  std::vector<Range> seen;  // positions of a batch row that any lane sees
  int64_t longest = 1;

  // `token_of` is the query of each lane, -1 for padding.
  Visible(int64_t batch, int64_t tokens, int64_t capacity, const std::vector<int64_t>& token_of,
          const std::optional<at::Tensor>& lengths, const std::optional<at::Tensor>& starts)
      : lanes(token_of.size()), last(batch * lanes, -1) {
    for (int64_t row = 0; row < batch; row++) {
      const int64_t length = lengths ? std::min<int64_t>(counts(lengths)[row], capacity) : capacity;
      const int64_t start = starts ? counts(starts)[row] : 0;
      for (int64_t lane = 0; lane < lanes; lane++) {
        if (token_of[lane] >= 0) last[row * lanes + lane] = length - tokens + token_of[lane];
      }
      seen.push_back({std::max<int64_t>(start, 0), length});
      longest = std::max(longest, length - seen[row].start);
    }
  }

  // Hides the scores [lanes] of a token after the row's start from the lanes that do not see it.
  void hide(int64_t row, int64_t position, float* scores) const {
    const Ints here = Ints{} + static_cast<int32_t>(position);
    for (int64_t lane = 0; lane < lanes; lane += WIDTH) {
      Ints high;
      std::memcpy(&high, &last[row * lanes + lane], sizeof(high));
      store(scores + lane, here <= high ? load(scores + lane) : Floats{} + LOWEST);
    }
  }
};

// sums [L lanes, ·] += weights [count, L lanes]^T @ tile [count, ·], for V vectors.
template <int L, int V>
void accumulate(int64_t count, const float* tile, int64_t stride, const float* weights, int64_t lanes, float* sums,
                int64_t width) {
  Floats total[L][V] = {};
  for (int64_t n = 0; n < count; n++) {
    Floats token[V];
    for (int v = 0; v < V; v++) token[v] = load(tile + n * stride + v * WIDTH);
    for (int l = 0; l < L; l++)
      for (int v = 0; v < V; v++) total[l][v] += token[v] * weights[n * lanes + l];
  }
  for (int l = 0; l < L; l++)
    for (int v = 0; v < V; v++) {
      float* sum = sums + l * width + v * WIDTH;
      store(sum, load(sum) + total[l][v]);
    }
}

// Running softmax over some tokens of a batch row: of each lane the highest score, the sum of weights, and the weighted
// sum of values [lanes, width].
struct Part {
  int64_t lanes, width;
  std::vector<float> highest, total, sums;

  Part(int64_t lanes, int64_t width)
      : lanes(lanes), width(padded(width)), highest(lanes, LOWEST), total(lanes), sums(lanes * this->width) {}

  // Replaces the scores [count, lanes] of a tile by weights, and scales the earlier sums.
  void weigh(int64_t count, float* scores) {
    for (int64_t first = 0; first < lanes; first += WIDTH) {
      Floats top = load(&highest[first]), sum = {};
      for (int64_t n = 0; n < count; n++) {
        const Floats score = load(scores + n * lanes + first);
        top = score > top ? score : top;
      }
      const Floats base = top > LOWEST ? top : Floats{};
      const Floats factor = exponential(load(&highest[first]) - base);
      for (int64_t n = 0; n < count; n++) {
        float* score = scores + n * lanes + first;
        const Floats weight = exponential(load(score) - base);
        store(score, weight);
        sum += weight;
      }
      store(&highest[first], top);
      store(&total[first], load(&total[first]) * factor + sum);
      for (int64_t lane = first; lane < first + WIDTH; lane++)
        if (factor[lane - first] != 1.0f)
          for (float *sum = &sums[lane * width], *end = sum + width; sum < end; sum += WIDTH)
            store(sum, load(sum) * factor[lane - first]);
    }
  }

  // Adds the values of a tile by the weights of lanes `first` ... `end` - 1.
  void add(int64_t count, const float* tile, int64_t stride, const float* weights, int64_t first, int64_t end) {
    for (; first + 5 <= end; first += 5) add_lanes<5>(count, tile, stride, weights, first);
    for (; first + 3 <= end; first += 3) add_lanes<3>(count, tile, stride, weights, first);
    for (; first < end; first++) add_lanes<1>(count, tile, stride, weights, first);
  }

  // Adds the part of other tokens.
  void merge(const Part& other) {
    for (int64_t lane = 0; lane < lanes; lane++) {
      const float top = std::max(highest[lane], other.highest[lane]);
      if (top == LOWEST) continue;
      const float own = std::exp(highest[lane] - top), others = std::exp(other.highest[lane] - top);
      for (int64_t c = lane * width; c < (lane + 1) * width; c++) sums[c] = own * sums[c] + others * other.sums[c];
      total[lane] = own * total[lane] + others * other.total[lane];
      highest[lane] = top;
    }
  }

 private:
  template <int L>
  void add_lanes(int64_t count, const float* tile, int64_t stride, const float* weights, int64_t lane) {
    float* sum = &sums[lane * width];
    int64_t c = 0;
    for (; c + 4 * WIDTH <= width; c += 4 * WIDTH)
      accumulate<L, 4>(count, tile + c, stride, weights + lane, lanes, sum + c, width);
    for (; c < width; c += WIDTH) accumulate<L, 1>(count, tile + c, stride, weights + lane, lanes, sum + c, width);
  }
};

// Runs `attend(batch row, start, stop, part)` for ranges of the visible tokens in parallel; returns the merged parts.
template <typename Attend>
std::vector<Part> over_tokens(const Visible& visible, int64_t width, const Attend& attend) {
  const int64_t batch = visible.seen.size(), wanted = (2 * at::get_num_threads() + batch - 1) / batch;
  const int64_t splits = std::max<int64_t>(1, std::min(wanted, visible.longest / SHORTEST));
  std::vector<Part> parts(batch * splits, Part(visible.lanes, width));
  at::parallel_for(0, batch * splits, 1, [&](int64_t task, int64_t end) {
    for (; task < end; task++) {
      const Visible::Range seen = visible.seen[task / splits];
      const int64_t size = ((seen.stop - seen.start) / splits / TILE + 1) * TILE;
      const int64_t start = seen.start + task % splits * size, stop = std::min(seen.stop, start + size);
      if (start < stop) attend(task / splits, start, stop, parts[task]);
    }
  });
  std::vector<Part> merged;
  for (int64_t row = 0; row < batch; row++) {
    merged.push_back(std::move(parts[row * splits]));
    for (int64_t number = 1; number < splits; number++) merged[row].merge(parts[row * splits + number]);
  }
  return merged;
}

}  // namespace packed_rows
