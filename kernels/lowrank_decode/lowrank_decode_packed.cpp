// `lowrank_decode_packed`: decode attention on CPUs over keys rebuilt from packed latents.
//
// The latents of a token are those of one or several layers (a cascade), concatenated. A tile of tokens is dequantized,
// its keys are rebuilt, biased, normalized and rotated by their position modulo `STEP`, and multiplied by the queries,
// which are rotated back by the rest. Values stay latents: a query's output is its weighted latent.
//
// Arguments, with B rows, T new tokens, H query heads, G KV heads, d head size, S tokens, R latents of a token, of which
// a head reads up to K for its keys and V for its values:
//   query         [B, T, H, d], rotated
//   rows          of each layer: packed rows [B, S, bytes], or with `pages` [P, page, bytes]
//   steps, means  of each layer: fp32 [channels]
//   exact         of each layer: first tokens in full precision [B, E, channels]; or empty
//   fields        (first byte, number of bytes, lowest bit, bits) of each field, of all layers
//   num_fields    number of fields of each layer
//   key_up        fp32 [G, K, d], padded to a multiple of 16 columns
//   ranges        for each KV head the first latent and the rank that its key reads, then those of its value
//   scale         multiplies the logits
//   key_bias      fp32 [G, d]
//   norm_weight   fp32 [d], of an RMS norm of each key with `norm_eps`
//   within, begins, exact_starts, lengths, starts, pages  as in mla_decode/packed_operator.py; element i of a key is
//                 rotated with i + d/2
// Returns the weighted latents [B, T, H, V] in fp32, 0 past a head's own.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../packed_rows.h"

namespace {

using namespace packed_rows;

// Reads the latents of a token in all layers.
struct Reader {
  const std::vector<Rows>& layers;
  std::vector<uint8_t> bytes;

  explicit Reader(const std::vector<Rows>& layers) : layers(layers) {
    int64_t longest = 0;
    for (const Rows& rows : layers) longest = std::max(longest, rows.row_bytes);
    bytes.resize(longest + WIDTH);
  }

  void read(int64_t batch_row, int64_t position, float* token) {
    for (const Rows& rows : layers) {
      if (const float* exact = rows.full_precision(batch_row, position)) {
        std::copy(exact, exact + rows.channels, token);
      } else {
        std::memcpy(bytes.data(), rows.row(batch_row, position), rows.row_bytes);
        unpack(rows.fields.data(), rows.fields.data() + rows.fields.size(), bytes.data(), token);
        for (int64_t c = 0; c < rows.channels; c++) token[c] = rows.mean[c] + rows.step[c] * token[c];
      }
      token += rows.channels;
    }
  }
};

// Latents that a KV head reads.
struct Range {
  int64_t key_first, key_rank, value_first, value_rank;
};

// Adds the bias to a token's keys [groups, stride], normalizes them, and rotates them.
struct KeyFinish {
  int64_t groups, dim, stride;
  const float *bias, *weight;
  float eps;
  const Rotations* rotations;

  void run(float* __restrict key, int64_t position) const {
    for (int64_t group = 0; group < groups; group++, key += stride) {
      for (int64_t c = 0; bias && c < dim; c++) key[c] += bias[group * dim + c];
      if (weight) {
        float squares = 0.0f;
        for (int64_t c = 0; c < dim; c++) squares += key[c] * key[c];
        const float inverse = 1.0f / std::sqrt(squares / dim + eps);
        for (int64_t c = 0; c < dim; c++) key[c] *= inverse * weight[c];
      }
      if (rotations == nullptr) continue;
      const float *cosine = rotations->cosines(position), *sine = rotations->sines(position);
      float* __restrict imaginary = key + dim / 2;
      for (int64_t pair = 0; pair < dim / 2; pair++) {
        const float x = key[pair], y = imaginary[pair];
        key[pair] = x * cosine[pair] - y * sine[pair];
        imaginary[pair] = x * sine[pair] + y * cosine[pair];
      }
    }
  }
};

at::Tensor lowrank_decode_packed(
    const at::Tensor& query, at::TensorList rows, at::TensorList steps, at::TensorList means, at::TensorList exact,
    at::IntArrayRef fields, at::IntArrayRef num_fields, const at::Tensor& key_up, at::IntArrayRef flat, double scale,
    const std::optional<at::Tensor>& key_bias, const std::optional<at::Tensor>& norm_weight, double norm_eps,
    const std::optional<at::Tensor>& within, const std::optional<at::Tensor>& begins,
    const std::optional<at::Tensor>& exact_starts, const std::optional<at::Tensor>& lengths,
    const std::optional<at::Tensor>& starts, const std::optional<at::Tensor>& pages) {
  const int64_t batch = query.size(0), tokens = query.size(1), heads = query.size(2), dim = query.size(3);
  std::vector<Rows> layers;
  int64_t rank = 0;
  for (size_t layer = 0, first = 0; layer < rows.size(); first += 4 * num_fields[layer++]) {
    const std::optional<at::Tensor> full = exact.empty() ? std::nullopt : std::make_optional(exact[layer]);
    layers.emplace_back(rows[layer], fields.slice(first, 4 * num_fields[layer]), steps[layer], means[layer], full,
                        exact_starts, pages);
    rank += layers.back().channels;
  }
  std::vector<Range> ranges;
  for (size_t i = 0; i + 3 < flat.size(); i += 4) ranges.push_back({flat[i], flat[i + 1], flat[i + 2], flat[i + 3]});
  int64_t value_rank = 0;
  for (const Range& range : ranges) value_rank = std::max(value_rank, range.value_rank);
  const int64_t groups = ranges.size();
  const at::Tensor up = floats(key_up), wide = floats(query);
  const at::Tensor bias = key_bias ? floats(*key_bias) : at::Tensor();
  const at::Tensor weight = norm_weight ? floats(*norm_weight) : at::Tensor();
  const std::optional<Rotations> rotations = within ? std::make_optional<Rotations>(*within, *begins) : std::nullopt;
  const int64_t sharing = heads / groups;
  const int64_t used = tokens * sharing, width = padded(used), lanes = groups * width;  // of a group; of all
  // Vectors of values may end after the last latent.
  const int64_t stride = padded(rank) + padded(value_rank), key_width = up.size(2), key_stride = groups * key_width;
  const KeyFinish finish{groups, dim, key_width, key_bias ? bias.const_data_ptr<float>() : nullptr,
                         norm_weight ? weight.const_data_ptr<float>() : nullptr, static_cast<float>(norm_eps),
                         rotations ? &*rotations : nullptr};
  std::vector<int64_t> token_of(lanes, -1);
  for (int64_t group = 0; group < groups; group++)
    for (int64_t lane = 0; lane < used; lane++) token_of[group * width + lane] = lane / sharing;
  const Visible visible(batch, tokens, layers.back().capacity, token_of, lengths, starts);

  // Queries [groups, dim, lanes of a group] of each batch row.
  std::vector<std::vector<float>> queries(batch, std::vector<float>(dim * lanes));
  for (int64_t row = 0; row < batch; row++)
    for (int64_t token = 0; token < tokens; token++)
      for (int64_t head = 0; head < heads; head++) {
        const float* from = wide.const_data_ptr<float>() + ((row * tokens + token) * heads + head) * dim;
        float* to = &queries[row][head / sharing * dim * width + token * sharing + head % sharing];
        for (int64_t c = 0; c < dim; c++) to[c * width] = static_cast<float>(scale) * from[c];
      }

  const std::vector<Part> parts = over_tokens(visible, value_rank, [&](int64_t row, int64_t start, int64_t end, Part& part) {
    const std::vector<float>& own = queries[row];
    std::vector<float> turned(own), tile(TILE * stride), keys(TILE * key_stride), scores(TILE * lanes);
    Reader reader(layers);
    for (int64_t begin = -1, stop; start < end; start = stop) {
      stop = std::min(end, (start / TILE + 1) * TILE);
      const int64_t count = stop - start;
      if (rotations && start / STEP != begin) {
        begin = start / STEP;
        for (int64_t group = 0; group < groups; group++) {
          const float* from = &own[group * dim * width];
          float* to = &turned[group * dim * width];
          const int64_t half = dim / 2 * width;
          rotations->turn_back(begin, width, from, from + half, width, to, to + half);
        }
      }
      for (int64_t n = 0; n < count; n++) reader.read(row, start + n, &tile[n * stride]);
      for (int64_t group = 0; group < groups; group++) {
        const float* matrix = up.const_data_ptr<float>() + group * up.size(1) * key_width;
        multiply(count, ranges[group].key_rank, &tile[ranges[group].key_first], stride, matrix, key_width,
                 &keys[group * key_width], key_stride);
      }
      for (int64_t n = 0; n < count; n++) finish.run(&keys[n * key_stride], start + n);
      for (int64_t group = 0; group < groups; group++)
        multiply(count, dim, &keys[group * key_width], key_stride, &turned[group * dim * width], width, &scores[group * width],
                 lanes);
      for (int64_t n = 0; n < count; n++) visible.hide(row, start + n, &scores[n * lanes]);
      part.weigh(count, scores.data());
      for (int64_t group = 0; group < groups; group++)
        part.add(count, &tile[ranges[group].value_first], stride, scores.data(), group * width, group * width + used);
    }
  });

  const at::Tensor out = at::empty({batch, tokens, heads, value_rank}, at::kFloat);
  float* to = out.mutable_data_ptr<float>();
  for (int64_t row = 0; row < batch; row++)
    for (int64_t token = 0; token < tokens; token++)
      for (int64_t head = 0; head < heads; head++) {
        const int64_t lane = head / sharing * width + token * sharing + head % sharing;
        const Part& part = parts[row];
        const float factor = part.total[lane] > 0 ? 1.0f / part.total[lane] : 0.0f;
        const int64_t own = ranges[head / sharing].value_rank;
        for (int64_t c = 0; c < value_rank; c++) *to++ = c < own ? factor * part.sums[lane * part.width + c] : 0.0f;
      }
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(surgery_cpu, library) {
  library.def(
      "lowrank_decode_packed(Tensor query, Tensor[] rows, Tensor[] steps, Tensor[] means, Tensor[] exact, "
      "int[] fields, int[] num_fields, Tensor key_up, int[] ranges, float scale, Tensor? key_bias=None, "
      "Tensor? norm_weight=None, float norm_eps=0.0, Tensor? within=None, Tensor? begins=None, Tensor? exact_starts=None, "
      "Tensor? lengths=None, Tensor? starts=None, Tensor? pages=None) -> Tensor");
  library.impl("lowrank_decode_packed", at::kCPU, &lowrank_decode_packed);
}
