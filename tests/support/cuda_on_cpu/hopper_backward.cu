// The backward pass of csrc/cuda/hopper for tests/support/hopper_backward.py, which puts it behind that folder's
// sources.
#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>

#include "../../../csrc/cuda/hopper/attention.h"

namespace {
using namespace foundry::cuda;

struct Call {
  const void* inputs[5];  // q, k, v, out, dout
  void* outputs[3];       // dq, dk, dv
  int64_t strides[8][3];
  const double* lse;
  const float* dlse;
  float* delta;
  const int32_t *starts_q, *starts_k;
  const float* slopes;
  float* floats;
  int32_t* integers;
  int64_t bf16, sequences, heads, queries, keys, total_q, total_k, group, head_dim, head_dim_v, slopes_stride;
  int64_t left, right, bottom_right, deterministic, multiprocessors, batch_invariant;
  int64_t splits[2];  // of heads and rows; zeros for those that the shape decides
  double scale, softcap;
  int64_t row_strides[3];
};

AttentionBackward arguments(const Call& c) {
  AttentionBackward a{};
  const auto strides = [&](int i) { return foundry::HeadStrides{c.strides[i][0], c.strides[i][1], c.strides[i][2]}; };
  a.q = c.inputs[0], a.k = c.inputs[1], a.v = c.inputs[2], a.out = c.inputs[3], a.dout = c.inputs[4];
  a.q_strides = strides(0), a.k_strides = strides(1), a.v_strides = strides(2);
  a.out_strides = strides(3), a.dout_strides = strides(4);
  a.dq = c.outputs[0], a.dk = c.outputs[1], a.dv = c.outputs[2];
  a.dq_strides = strides(5), a.dk_strides = strides(6), a.dv_strides = strides(7);
  a.lse = c.lse, a.dlse = c.dlse, a.delta = c.delta;
  a.type = c.bf16 ? foundry::Dtype::bf16 : foundry::Dtype::f16;
  a.starts_q = c.starts_q, a.starts_k = c.starts_k;
  a.n_sequences = c.sequences, a.n_heads = c.heads, a.n_queries = c.queries, a.n_keys = c.keys;
  a.total_q = c.total_q, a.total_k = c.total_k, a.group = c.group;
  a.head_dim = int(c.head_dim), a.head_dim_v = int(c.head_dim_v);
  a.scale = float(c.scale), a.softcap = float(c.softcap);
  a.alibi_slopes = c.slopes, a.alibi_slopes_batch_stride = c.slopes_stride;
  a.window_left = c.left, a.window_right = c.right, a.bottom_right = c.bottom_right != 0;
  a.batch_invariant = c.batch_invariant != 0;
  a.row_strides = {c.row_strides[0], c.row_strides[1], c.row_strides[2]};
  return a;
}
hopper::BackwardPlan plan_of(const Call& c) {
  hopper::BackwardPlan plan = hopper::plan_backward(arguments(c), c.deterministic != 0);
  if (c.splits[0]) plan.head_splits = int(c.splits[0]), plan.row_splits = int(c.splits[1]);
  return plan;
}
}  // namespace

extern "C" int takes_backward(const Call* c) { return hopper::takes(arguments(*c)); }
extern "C" void plan_of_backward(const Call* c, int64_t* numbers) {
  const hopper::BackwardPlan plan = plan_of(*c);
  const hopper::BackwardSpace space = hopper::backward_space(arguments(*c), plan);
  const int64_t all[] = {plan.pairs, plan.head_splits, plan.row_splits, plan.blocks, space.floats, space.integers};
  std::copy(std::begin(all), std::end(all), numbers);
}
extern "C" const char* run_backward(const Call* c, int seed) {
  static std::string report;
  cuda_on_cpu_schedule(unsigned(seed), int(c->multiprocessors));
  report.clear();
  try {
    const cudaError_t error = hopper::attention_backward(arguments(*c), plan_of(*c), c->floats, c->integers, nullptr);
    if (error != cudaSuccess) report = "error " + std::to_string(int(error));
  } catch (const std::runtime_error& e) {
    report = e.what();
  }
  return report.c_str();
}
