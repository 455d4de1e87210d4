// `mla_decode_packed` on CPUs; arguments and results as in packed_operator.py.
//
// A tile of tokens is unpacked to fp32, multiplied by the queries and, weighted, added to the sums. Steps and means of
// latents are folded into queries and outputs, so that a tile holds centered codes. Shared keys are dequantized and
// rotated by their position modulo `STEP`, queries back by the rest. A token of a tile is its rotated key (all real
// parts, then all imaginary ones), its latent, and, if values are read from it too, its key before the rotation.

#include <ATen/ops/empty.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include "../packed_rows.h"

namespace {

using namespace packed_rows;

// Queries of one batch row, transposed: element c of all lanes is at c * lanes.
struct Queries {
  int64_t depth;                // elements of a token that change scores: all, or those of its rotated key
  std::vector<float> scaled;    // [elements of a token, lanes]; those of rotated keys are turned
  std::vector<float> pairs;     // [2 * pairs, lanes], not turned
  std::vector<float> constant;  // [lanes], share of the means in every score

  // `query` [used, width of values + width of a key]
  Queries(const Rows& rows, int64_t rank, int64_t values, int64_t used, int64_t lanes, const float* query, float scale)
      : depth(rows.channels - rank), scaled((depth + values) * lanes), pairs(depth * lanes), constant(lanes) {
    const int64_t key = depth;
    for (int64_t lane = 0; lane < used; lane++, query += values + key) {
      for (int64_t c = 0; c < values; c++) {
        if (query[c] == 0.0f) continue;
        depth = key + values;
        scaled[(key + c) * lanes + lane] = scale * query[c] * (c < rank ? rows.step[c] : 1.0f);
        if (c < rank) constant[lane] += scale * query[c] * rows.mean[c];
      }
      for (int64_t c = 0; c < key; c++) pairs[c * lanes + lane] = scale * query[values + c];
    }
  }
};

// Rotates a shared key to a position: all real parts, then all imaginary ones.
void rotate(const Rotations& rotations, const float* __restrict key, int64_t position, float* __restrict real) {
  const float *cosine = rotations.cosines(position), *sine = rotations.sines(position);
  float* __restrict imaginary = real + rotations.pairs;
  int64_t pair = 0;
  for (; pair + WIDTH <= rotations.pairs; pair += WIDTH) {
    float even[WIDTH], odd[WIDTH];  // compilers turn this loop into shuffles; GCC has an operator for them since 12
    for (int64_t i = 0; i < WIDTH; i++) even[i] = key[2 * (pair + i)], odd[i] = key[2 * (pair + i) + 1];
    const Floats x = load(even), y = load(odd);
    const Floats c = load(cosine + pair), s = load(sine + pair);
    store(real + pair, x * c - y * s);
    store(imaginary + pair, x * s + y * c);
  }
  for (; pair < rotations.pairs; pair++) {
    real[pair] = key[2 * pair] * cosine[pair] - key[2 * pair + 1] * sine[pair];
    imaginary[pair] = key[2 * pair] * sine[pair] + key[2 * pair + 1] * cosine[pair];
  }
}

// Reads tokens as the queries expect them.
struct Reader {
  const Rows& rows;
  const Rotations* rotations;
  int64_t rank;
  bool with_keys;               // values are read from keys too
  const Field* keys;            // first field of the shared key
  std::vector<uint8_t> bytes;   // of a row, with room for a vector
  std::vector<float> own_key;   // before its rotation, with room for vectors

  Reader(const Rows& rows, const Rotations* rotations, int64_t rank, bool with_keys)
      : rows(rows), rotations(rotations), rank(rank), with_keys(with_keys), keys(rows.fields.data()),
        bytes(rows.row_bytes + WIDTH), own_key(rows.channels - rank + 2 * WIDTH) {
    for (int64_t channel = 0; channel < rank; keys++) channel += keys->count;
  }

  void read(int64_t batch_row, int64_t position, float* token) {
    const int64_t width = rows.channels - rank;
    float *latent = token + width, *key = with_keys ? latent + rank : own_key.data();
    if (const float* exact = rows.full_precision(batch_row, position)) {
      for (int64_t c = 0; c < rank; c++) latent[c] = (exact[c] - rows.mean[c]) / rows.step[c];
      std::copy(exact + rank, exact + rows.channels, key);
    } else {
      std::memcpy(bytes.data(), rows.row(batch_row, position), rows.row_bytes);
      unpack(rows.fields.data(), keys, bytes.data(), latent);
      unpack(keys, rows.fields.data() + rows.fields.size(), bytes.data(), key);
      const float *mean = rows.mean + rank, *step = rows.step + rank;
      for (int64_t c = 0; c < width; c++) key[c] = mean[c] + step[c] * key[c];
    }
    if (rotations) rotate(*rotations, key, position, token);
  }
};

std::tuple<at::Tensor, at::Tensor> mla_decode_packed(
    const at::Tensor& query, const at::Tensor& packed, const at::Tensor& step, const at::Tensor& mean, double scale,
    at::IntArrayRef fields, int64_t rank, const std::optional<at::Tensor>& within,
    const std::optional<at::Tensor>& begins, const std::optional<at::Tensor>& exact,
    const std::optional<at::Tensor>& exact_starts, const std::optional<at::Tensor>& lengths,
    const std::optional<at::Tensor>& starts, const std::optional<at::Tensor>& pages) {
  const int64_t batch = query.size(0), tokens = query.size(1), heads = query.size(2), used = tokens * heads;
  const int64_t lanes = padded(used);
  const Rows rows(packed, fields, step, mean, exact, exact_starts, pages);
  const int64_t width = rows.channels - rank, values = query.size(3) - width;
  const int64_t stride = padded(width) + padded(values) + 2 * WIDTH;
  const std::optional<Rotations> rotations = within ? std::make_optional<Rotations>(*within, *begins) : std::nullopt;
  std::vector<int64_t> token_of(lanes, -1);
  for (int64_t lane = 0; lane < used; lane++) token_of[lane] = lane / heads;
  const Visible visible(batch, tokens, rows.capacity, token_of, lengths, starts);
  const at::Tensor wide = floats(query);
  std::vector<Queries> queries;
  for (int64_t row = 0; row < batch; row++)
    queries.emplace_back(
        rows, rank, values, used, lanes, wide.const_data_ptr<float>() + row * used * query.size(3), scale);

  const std::vector<Part> parts = over_tokens(visible, values, [&](int64_t row, int64_t start, int64_t end, Part& part) {
    Queries own = queries[row];
    Reader reader(rows, rotations ? &*rotations : nullptr, rank, values > rank);
    std::vector<float> tile(TILE * stride), scores(TILE * lanes);
    for (int64_t begin = -1, stop; start < end; start = stop) {
      stop = std::min(end, (start / TILE + 1) * TILE);
      const int64_t count = stop - start;
      if (rotations && start / STEP != begin) {
        begin = start / STEP;
        float *real = own.scaled.data(), *imaginary = real + rotations->pairs * lanes;
        rotations->turn_back(begin, lanes, own.pairs.data(), own.pairs.data() + lanes, 2 * lanes, real, imaginary);
      }
      for (int64_t n = 0; n < count; n++) reader.read(row, start + n, &tile[n * stride]);
      multiply(count, own.depth, tile.data(), stride, own.scaled.data(), lanes, scores.data(), lanes);
      for (int64_t n = 0; n < count; n++) {
        float* score = &scores[n * lanes];
        const uint8_t* gains = rows.row(row, start + n) + rows.row_bytes;
        for (int64_t lane = 0; rows.gains && lane < used; lane++) {
          c10::Half gain;
          std::memcpy(&gain, gains + lane % heads * rows.gains / heads * sizeof(gain), sizeof(gain));
          score[lane] = (score[lane] + own.constant[lane]) * static_cast<float>(gain);
        }
        visible.hide(row, start + n, score);
      }
      part.weigh(count, scores.data());
      part.add(count, tile.data() + width, stride, scores.data(), 0, used);
    }
  });

  const at::Tensor out = at::empty({batch, tokens, heads, values}, at::kFloat);
  const at::Tensor lse = at::empty({batch, tokens, heads}, at::kFloat);
  float *to = out.mutable_data_ptr<float>(), *logarithm = lse.mutable_data_ptr<float>();
  for (int64_t row = 0; row < batch; row++)
    for (int64_t lane = 0; lane < used; lane++) {
      const Part& part = parts[row];
      const bool sees = part.total[lane] > 0;
      const float factor = sees ? 1.0f / part.total[lane] : 0.0f, *sums = &part.sums[lane * part.width];
      for (int64_t c = 0; c < rank; c++) *to++ = sees ? rows.mean[c] + rows.step[c] * sums[c] * factor : 0.0f;
      for (int64_t c = rank; c < values; c++) *to++ = sums[c] * factor;
      const float constant = rows.gains ? 0.0f : queries[row].constant[lane];
      *logarithm++ = sees ? std::log(part.total[lane]) + part.highest[lane] + constant : LOWEST;
    }
  return {out.to(query.scalar_type()), lse};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(surgery_cpu, library) {
  library.def(
      "mla_decode_packed(Tensor query, Tensor rows, Tensor step, Tensor mean, float scale, int[] fields, int rank, "
      "Tensor? within=None, Tensor? begins=None, Tensor? exact=None, Tensor? exact_starts=None, "
      "Tensor? lengths=None, Tensor? starts=None, Tensor? pages=None) -> (Tensor, Tensor)");
  library.impl("mla_decode_packed", at::kCPU, &mla_decode_packed);
}
