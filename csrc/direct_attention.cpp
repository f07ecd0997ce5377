// Direct calls (direct.cpp) of attention and of blocks that decode.
#include <array>
#include <cmath>
#include <vector>

#include "cuda/hopper/choice.h"
#include "direct.h"
#include "direct_calls.h"

namespace foundry {
namespace {

bool is_attention(const Tensor& q, const Tensor& k, const Tensor& v) {
  if (q.dim() != 4 || k.dim() != 4 || v.dim() != 4) return false;
  if (k.scalar_type() != q.scalar_type() || v.scalar_type() != q.scalar_type()) return false;
  const int64_t head_dim = q.size(3), head_dim_v = v.size(3), n_kv_heads = k.size(1);
  return k.size(0) == q.size(0) && v.size(0) == q.size(0) && v.size(1) == n_kv_heads && v.size(2) == k.size(2) &&
         k.size(3) == head_dim && 0 < head_dim && head_dim <= kMaxHeadDim && 0 < head_dim_v &&
         head_dim_v <= kMaxHeadDim && n_kv_heads > 0 && q.size(1) > 0 && q.size(1) % n_kv_heads == 0;
}

// The GPUs of this process, as attention needs to know them.
struct Gpus {
  bool supported = false;  // by the kernels of csrc/cuda
  bool hopper = false;     // all of them are Hopper, and csrc/cuda/hopper is compiled in
} gpus;

// Whether TMA can copy the tensor without conversion: rows begin at multiples of 16 bytes and do not overlap.
bool has_map(const Tensor& x) {
  constexpr int64_t kStep = 8;  // elements of 16 bits
  for (int64_t d = 0; d < 3; ++d)
    if (x.size(d) > 1 && (x.stride(d) <= 0 || x.stride(d) % kStep != 0)) return false;
  return x.size(3) % kStep == 0 && x.stride(3) == 1 && x.storage_offset() % kStep == 0;
}

// Whether "auto" uses csrc/cuda/hopper: `takes` of ops/flash_attention/hopper.py, restricted to the calls that come
// here and to tensors that need no copy.
bool is_for_hopper(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options) {
  constexpr int64_t kWidest = 256;
  return dtype_bit(q) != 1 && q.numel() > 0 && k.size(2) > 0 && q.size(3) <= kWidest && v.size(3) <= kWidest &&
         has_map(q) && has_map(k) && has_map(v) &&
         (options.batch_invariant ||
          hopper_choice::forward_is_faster({q.size(0) * q.size(1), q.size(1) / k.size(1), q.size(2), q.size(2),
                                            k.size(2), static_cast<int>(std::max(q.size(3), v.size(3)))}));
}

}  // namespace

PyObject* call_flash_attention(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  const OnAccelerator first{
      served.native, static_cast<uint8_t>(served.automatic | (gpus.hopper ? served.unmeasured : 0)), served.unmeasured};
  Arguments in(first, arguments, given, 7 + AttentionOptions::kArguments);
  const Tensor &q = in.tensor(), &k = in.tensor(), &v = in.tensor();
  const bool causal = in.boolean();
  AttentionOptions options;
  options.read_from(in);
  const bool return_lse = in.boolean(), return_stats = in.boolean();
  in.need(in.ok() && is_attention(q, k, v) && !return_lse && !return_stats);
  in.need(in.ok() && !autocasts(q));
  if (in.ok() && !q.is_cpu())
    in.need(gpus.supported && (!in.is_auto() || (served.automatic & dtype_bit(q)) || is_for_hopper(q, k, v, options)));
  if (!in.ok()) Py_RETURN_NONE;
  options.max_seqlen_q = q.size(2);
  options.max_seqlen_k = k.size(2);
  if (options.scale == 0.0) options.scale = std::pow(static_cast<double>(q.size(3)), -0.5);
  if (options.softcap && !is_positive_number(options.scale / *options.softcap)) Py_RETURN_NONE;
  if (causal) options.window_right = 0;
  return result_of([&] { return std::get<0>(flash_attention(q, k, v, options, false, false)); });
}

namespace {

// The arguments of decode_block besides the stream, from a tuple.
struct Block {
  std::array<Tensor, 7> weights;
  std::array<Tensor, 2> norms;
  Tensor cos, sin, k_cache, v_cache;
  BlockOptions options;

  bool read_from(PyObject* tuple) {
    Arguments in(tuple, 7 + 2 + 4 + BlockOptions::kArguments);
    for (Tensor& weight : weights) weight = in.tensor();
    for (Tensor& norm : norms) norm = in.tensor();
    for (Tensor* t : {&cos, &sin, &k_cache, &v_cache}) *t = in.tensor();
    options.read_from(in);
    return in.ok();
  }
};

}  // namespace

// Consecutive blocks, as a list with one tuple each.
PyObject* call_decode_blocks(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  Arguments in(served, arguments, given, 4);
  const OptionalTensor branch = in.optional_tensor();
  const Tensor& stream = in.tensor();
  std::vector<Block> blocks(in.ok() && PyList_CheckExact(arguments[3]) ? PyList_GET_SIZE(arguments[3]) : 0);
  in.need(!blocks.empty());
  for (size_t i = 0; i < blocks.size(); ++i)
    in.need(in.ok() && blocks[i].read_from(PyList_GET_ITEM(arguments[3], Py_ssize_t(i))));
  if (!in.ok()) Py_RETURN_NONE;
  try {
    return result_of([&] {
      std::tuple<Tensor, Tensor> found{unwrap(branch), stream};
      for (const Block& b : blocks)
        found = decode_block(wrap(std::get<0>(found)), std::get<1>(found), b.weights, b.norms, b.cos, b.sin, b.k_cache,
                             b.v_cache, b.options);
      return found;
    });
  } catch (const c10::ValueError&) {
    Py_RETURN_NONE;  // the general path writes to the caches again
  } catch (const c10::TypeError&) {
    Py_RETURN_NONE;
  }
}

void attention_gpus(bool supported, bool hopper) { gpus = {supported, hopper}; }

}  // namespace foundry
