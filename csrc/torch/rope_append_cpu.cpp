// The operator foundry_kernels::rope_append: takes the output of a QKV projection, rotates the queries, rotates the
// keys into the cache and copies the values into the cache. CPU inference only.
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "../cpu/rope.h"
#include "cpu_common.h"
#include "rope.h"

namespace foundry {
namespace rope_append_cpu {

// qkv [B, T, (H + 2 Hk) D], cos and sin [P, R/2], caches [B, Hk, S, D]. Allocates the queries: [B, H, T, D], stored as
// [B, T, H, D]. The meta device uses them as fakes.
Tensor check_and_make(const Tensor& qkv, const Tensor& cos, const Tensor& sin, const Tensor& k_cache,
                      const Tensor& v_cache, int64_t n_heads, const c10::SymInt& start) {
  TORCH_CHECK_VALUE(qkv.dim() == 3, "qkv must be [B, T, (H + 2 Hk) D]; got ", qkv.sym_sizes());
  TORCH_CHECK_VALUE(k_cache.dim() == 4 && k_cache.sym_sizes() == v_cache.sym_sizes(),
                    "k_cache and v_cache must be [B, Hk, S, D]; got ", k_cache.sym_sizes(), " and ",
                    v_cache.sym_sizes());
  TORCH_CHECK_TYPE(k_cache.scalar_type() == qkv.scalar_type() && v_cache.scalar_type() == qkv.scalar_type(),
                   "k_cache and v_cache must have qkv's dtype");
  const auto tokens = qkv.sym_size(1), width = k_cache.sym_size(3);
  TORCH_CHECK_VALUE(n_heads >= 0 && k_cache.sym_size(0) == qkv.sym_size(0) &&
                        (k_cache.sym_size(1) * 2 + n_heads) * width == qkv.sym_size(2),
                    "k_cache must be [B, Hk, S, D] with qkv's B and (H + 2 Hk) D; got ", k_cache.sym_sizes(), " and ",
                    qkv.sym_sizes());
  TORCH_CHECK_VALUE(start >= 0 && start + tokens <= k_cache.sym_size(2), "k_cache has no room for ", tokens,
                    " positions from ", start, "; it is ", k_cache.sym_sizes());
  TORCH_CHECK_VALUE(cos.dim() == 2 && sin.sym_sizes() == cos.sym_sizes(), "cos and sin must be [P, R/2]; got ",
                    cos.sym_sizes(), " and ", sin.sym_sizes());
  TORCH_CHECK_TYPE(sin.scalar_type() == cos.scalar_type(), "sin must have cos's dtype");
  TORCH_CHECK_VALUE(start + tokens <= cos.sym_size(0), "cos must have a row for each position up to ", start + tokens,
                    "; got ", cos.sym_sizes());
  TORCH_CHECK_VALUE(cos.sym_size(1) > 0 && cos.sym_size(1) * 2 <= width,
                    "cos must have a last dimension R/2 of 1 to D/2; got ", cos.sym_sizes());
  return at::empty_symint({qkv.sym_size(0), tokens, n_heads, width}, qkv.options()).transpose(1, 2);
}

Tensor append_meta(const Tensor& qkv, const Tensor& cos, const Tensor& sin, bool, const Tensor& k_cache,
                   const Tensor& v_cache, int64_t n_heads, c10::SymInt start) {
  return check_and_make(qkv, cos, sin, k_cache, v_cache, n_heads, start);
}

const void* at_row(const Tensor& table, int64_t row) {
  return static_cast<const char*>(table.const_data_ptr()) + row * table.stride(0) * table.element_size();
}

void written(const Tensor& cache) {
  if (!cache.is_inference()) cache.unsafeGetTensorImpl()->bump_version();
}

Tensor append_cpu(const Tensor& qkv_, const Tensor& cos_, const Tensor& sin_, bool interleaved, const Tensor& k_cache,
                  const Tensor& v_cache, int64_t n_heads, c10::SymInt start_) {
  const int64_t start = start_.guard_int(__FILE__, __LINE__);
  const Tensor q = check_and_make(qkv_, cos_, sin_, k_cache, v_cache, n_heads, start);
  TORCH_CHECK_VALUE(!(at::GradMode::is_enabled() && qkv_.requires_grad()),
                    "rope_append has no gradient; use torch.no_grad()");
  TORCH_CHECK_VALUE(k_cache.is_contiguous() && v_cache.is_contiguous(), "k_cache and v_cache must be contiguous");
  if (qkv_.numel() == 0) return q;
  const Tensor qkv = qkv_.contiguous(), cos = unit_stride(cos_), sin = unit_stride(sin_);
  const int64_t tokens = qkv.size(1), n_kv_heads = k_cache.size(1), width = k_cache.size(3), size = qkv.element_size();
  const RopeStrides packed{tokens * qkv.size(2), width, qkv.size(2)};
  const RopeStrides cached{k_cache.stride(0), k_cache.stride(1), k_cache.stride(2)};
  const char* in = static_cast<const char*>(qkv.const_data_ptr());
  char* values = static_cast<char*>(v_cache.mutable_data_ptr()) + start * width * size;
  char* keys = static_cast<char*>(k_cache.mutable_data_ptr()) + start * width * size;
  const char* new_values = in + (n_heads + n_kv_heads) * width * size;

  Rope args{};
  set_call(args, q, cos, sin, RopeOptions{interleaved, std::nullopt});
  args.tables.cos = at_row(cos, start);
  args.tables.sin = at_row(sin, start);
  args.tables.n_rows -= start;
  if (n_heads > 0) args.heads[0] = {in, q.mutable_data_ptr(), n_heads, packed, rope_strides(q)};
  args.heads[1] = {in + n_heads * width * size, keys, n_kv_heads, packed, cached};
  const auto kernel = FK_CHOOSE_ISA(rope);
  at::parallel_for(0, args.all_tokens, std::max<int64_t>(1, kGrain / qkv.size(2)), [&](int64_t begin, int64_t end) {
    kernel(args, begin, end);
    for (int64_t token = begin; token < end; ++token) {
      const int64_t b = token / tokens, t = token % tokens;
      for (int64_t h = 0; h < n_kv_heads; ++h)
        std::memcpy(values + cached.offset(b, h, t) * size, new_values + packed.offset(b, h, t) * size, width * size);
    }
  });
  written(k_cache);
  written(v_cache);
  return q;
}

}  // namespace rope_append_cpu

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  m.def(
      "rope_append(Tensor qkv, Tensor cos, Tensor sin, bool interleaved, Tensor(a!) k_cache, Tensor(b!) v_cache, "
      "int n_heads, SymInt start) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CPU, m) { m.impl("rope_append", &rope_append_cpu::append_cpu); }

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) { m.impl("rope_append", &rope_append_cpu::append_meta); }

TORCH_LIBRARY_IMPL(FK_LIBRARY, Autograd, m) { m.impl("rope_append", torch::CppFunction::makeFallthrough()); }

}  // namespace foundry
