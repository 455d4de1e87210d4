// `pack_rows` on CPUs; arguments and results as in operator.py, the same bytes as reference.py.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

constexpr int64_t GRAIN = 16;  // least tokens of a thread

at::Tensor pack_rows(const at::Tensor& values, const at::Tensor& step, const at::Tensor& mean, at::IntArrayRef fields) {
  int64_t row_bytes = 0;
  for (size_t i = 0; i + 3 < fields.size(); i += 4) row_bytes = std::max(row_bytes, fields[i] + fields[i + 1]);
  const at::Tensor wide = values.to(at::kFloat).contiguous(), steps = step.contiguous(), means = mean.contiguous();
  const at::Tensor rows = at::zeros({values.size(0), values.size(1), row_bytes}, at::kByte);
  const float *all_values = wide.const_data_ptr<float>(), *all_steps = steps.const_data_ptr<float>();
  const float* all_means = means.const_data_ptr<float>();
  uint8_t* all_rows = rows.mutable_data_ptr<uint8_t>();
  at::parallel_for(0, values.size(0) * values.size(1), GRAIN, [&](int64_t token, int64_t end) {
    for (; token < end; token++) {
      const float *value = all_values + token * values.size(2), *divisor = all_steps, *center = all_means;
      for (size_t i = 0; i + 3 < fields.size(); i += 4) {
        uint8_t* byte = all_rows + token * row_bytes + fields[i];
        const float highest = static_cast<float>((1 << fields[i + 3]) - 1);
        for (int64_t j = 0; j < fields[i + 1]; j++) {
          const float level = std::nearbyint((*value++ - *center++) / *divisor++ + 0.5f * highest);  // ties to even
          const int32_t code = level > 0 ? static_cast<int32_t>(std::min(level, highest)) : 0;  // 0 for NaN
          byte[j] |= static_cast<uint8_t>(code << fields[i + 2]);
        }
      }
    }
  });
  return rows;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(surgery_cpu, library) {
  library.def("pack_rows(Tensor values, Tensor step, Tensor mean, int[] fields) -> Tensor");
  library.impl("pack_rows", at::kCPU, &pack_rows);
}
