// The operator foundry_kernels::decode_block: a whole decoder block for a few rows (norm, QKV, RoPE and cache update,
// attention, output projection, norm, gate and up, gated activation, down). It runs the kernels of these operations in
// one parallel region; results are bitwise those of the separate calls. CPU inference only.
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <vector>

#include "../cpu/decode_linear.h"
#include "../cpu/flash_attention_tasks.h"
#include "../cpu/processor.h"
#include "../cpu/rope.h"
#include "../cpu/swiglu.h"
#include "cpu_common.h"
#include "decode_block_pages.h"
#include "flash_attention.h"
#include "operators.h"
#include "phases.h"
#include "rms_norm.h"
#include "rope.h"
#include "swiglu.h"

namespace foundry {
namespace decode_block_cpu {

// Multiplications that justify another thread, at the speed at which it reads weights from memory.
constexpr int64_t kGrainOfThread = 1 << 17;
// The most rows. Rows of a paged cache come from many sequences; the kernel multiplies kDecodeLinearRows of them at a
// time by the same block of a weight.
constexpr int64_t kMostRows = kDecodeLinearRows, kMostPagedRows = 4 * kDecodeLinearRows;

enum Weight { kQuery, kKey, kValue, kOut, kGate, kUp, kDown, kWeights };

// Returns the block's branch and stream. The meta device uses them as fakes.
std::tuple<Tensor, Tensor> check_and_make(const OptionalTensor& branch, const Tensor& stream, at::TensorList weights,
                                          at::TensorList norms, const Tensor& cos, const Tensor& sin,
                                          const Tensor& k_cache, const Tensor& v_cache, const BlockOptions& options) {
  TORCH_CHECK_VALUE(stream.dim() == 3, "stream must be [B, T, dim]; got ", stream.sym_sizes());
  const auto batch = stream.sym_size(0), tokens = stream.sym_size(1), dim = stream.sym_size(2);
  TORCH_CHECK_VALUE(!branch || branch->sym_sizes() == stream.sym_sizes(), "branch must have stream's shape");
  TORCH_CHECK_VALUE(weights.size() == kWeights && norms.size() == 2, "there must be ", int(kWeights),
                    " weights and those of 2 norms");
  const bool paged = options.block_table.has_value();
  TORCH_CHECK_VALUE(
      k_cache.dim() == 4 && k_cache.sym_sizes() == v_cache.sym_sizes() && (paged || k_cache.sym_size(0) == batch),
      "k_cache and v_cache must be [B, Hk, S, D], or [n_pages, page_size, Hk, D] with a block_table; got ",
      k_cache.sym_sizes(), " and ", v_cache.sym_sizes());
  if (paged) check_block_pages(k_cache, batch * tokens, options);
  const auto n_kv_heads = k_cache.sym_size(paged ? 2 : 1), width = k_cache.sym_size(3),
             hidden = weights[kGate].sym_size(0);
  TORCH_CHECK_VALUE(options.n_heads > 0 && n_kv_heads > 0 && options.n_heads % n_kv_heads == 0,
                    "n_heads must be a multiple of the cache's ", n_kv_heads, "; got ", options.n_heads);
  TORCH_CHECK_VALUE(width > 0 && width <= kMaxHeadDim && hidden > 0 && dim > 0,
                    "widths must be at least 1, and that of a head at most ", kMaxHeadDim);
  const auto q_width = width * options.n_heads, kv_width = width * n_kv_heads;
  const c10::SymInt shapes[kWeights][2] = {{q_width, dim}, {kv_width, dim}, {kv_width, dim}, {dim, q_width},
                                           {hidden, dim},  {hidden, dim},   {dim, hidden}};
  for (int i = 0; i < kWeights; ++i)
    TORCH_CHECK_VALUE(weights[i].sym_sizes() == c10::SymIntArrayRef(shapes[i]), "weights[", i, "] must be ",
                      c10::SymIntArrayRef(shapes[i]), "; got ", weights[i].sym_sizes());
  for (const Tensor& norm : norms) {
    check_vector("the weight of a norm", norm, stream);
    TORCH_CHECK_TYPE(y_dtype(stream, norm, options.round_before_weight) == stream.scalar_type(),
                     "the norms must give stream's dtype");
  }
  const auto check_dtype = [&](const Tensor& t) {
    TORCH_CHECK_TYPE(t.scalar_type() == stream.scalar_type(), "branch, weights and caches must have stream's dtype");
  };
  if (branch) check_dtype(*branch);
  for (const Tensor& weight : weights) check_dtype(weight);
  check_dtype(k_cache), check_dtype(v_cache);
  const auto& start = options.start;
  TORCH_CHECK_VALUE(paged || (start >= 0 && start + tokens <= k_cache.sym_size(2)), "k_cache has no room for ", tokens,
                    " positions from ", start, "; it is ", k_cache.sym_sizes());
  TORCH_CHECK_VALUE(cos.dim() == 2 && sin.sym_sizes() == cos.sym_sizes() &&
                        (paged || start + tokens <= cos.sym_size(0)) && cos.sym_size(1) > 0 &&
                        cos.sym_size(1) * 2 <= width,
                    "cos and sin must be [P, R/2] with a row for each position and R of 2 to D; got ", cos.sym_sizes(),
                    " and ", sin.sym_sizes());
  TORCH_CHECK_TYPE(sin.scalar_type() == cos.scalar_type(), "sin must have cos's dtype");
  activation_of(options.activation);
  return {at::empty_symint(stream.sym_sizes(), stream.options()),
          at::empty_symint(stream.sym_sizes(), stream.options())};
}

// One call: the kernel arguments and the memory between them.
class Block {
 public:
  Block(const OptionalTensor& branch, const Tensor& stream, at::TensorList weights, at::TensorList norms,
        const Tensor& cos, const Tensor& sin, const Tensor& k_cache, const Tensor& v_cache, const BlockOptions& options,
        const Tensor& branch_out, const Tensor& stream_out)
      : type_(dtype_of(stream)),
        size_(stream.element_size()),
        pages_(options, k_cache, cos.size(0)),
        batch_(pages_ ? stream.size(0) * stream.size(1) : stream.size(0)),
        tokens_(pages_ ? 1 : stream.size(1)),
        n_rows_(batch_ * tokens_),
        dim_(stream.size(2)),
        n_heads_(options.n_heads),
        n_kv_heads_(k_cache.size(pages_ ? 2 : 1)),
        width_(k_cache.size(3)),
        hidden_(weights[kGate].size(0)),
        start_(options.start.expect_int()),
        branch_in_(branch ? branch->contiguous() : Tensor()),
        stream_in_(stream.contiguous()),
        cos_(unit_stride(cos)),
        sin_(unit_stride(sin)),
        k_cache_(k_cache),
        v_cache_(v_cache),
        branch_out_(branch_out),
        stream_out_(stream_out) {
    int64_t elements = 0;
    for (int i = 0; i < kWeights; ++i) {
      weights_[i] = weights[i].stride(1) == 1 ? weights[i] : weights[i].contiguous();
      elements += weights_[i].numel();
    }
    n_threads_ = std::clamp<int64_t>(elements / kGrainOfThread, 1, at::get_num_threads());
    for (int i = 0; i < 2; ++i) {
      norms_[i] = float_weight(norms[i], options.weight_offset, reads_split(type_, type_));
      set_norm(i, options);
    }
    allocate();
    set_rope(options);
    set_attention(options);
    activation_ = activation_of(options.activation);
  }

  void run() {
    const DecodeLinear qkv = product(qkv_, {kQuery, kKey, kValue}), out = product(attended_, branch_mid_, {kOut}),
                       gate_up = product(gate_up_, {kGate, kUp}), down = product(gated_, bytes(branch_out_), {kDown});
    const int64_t n_gates = gate_up.matrices[0].blocks();
    const auto multiply = [this, kernel = FK_CHOOSE_ISA(decode_linear)](DecodeLinear args, int norm, int64_t block,
                                                                        int64_t thread) {
      if (norm >= 0) args.x = normed(thread);
      for (int64_t row = 0; row < n_rows_; row += kDecodeLinearRows) kernel(args.few_rows(row), block, block + 1);
    };
    Phases phases({{blocks(qkv), [this](int64_t thread) { normalize(0, thread); },
                    [&](int64_t block, int64_t thread) { multiply(qkv, 0, block, thread); },
                    [this](int64_t thread) {
                      keep_sum(0, thread);
                      append();
                    }},
                   {n_attention_tasks(), {}, [this](int64_t task, int64_t thread) { attend(task, thread); }, {}},
                   {blocks(out), {}, [&](int64_t block, int64_t thread) { multiply(out, -1, block, thread); }, {}},
                   {n_gates, [this](int64_t thread) { normalize(1, thread); },
                    [&](int64_t block, int64_t thread) {
                      multiply(gate_up, 1, block, thread);
                      multiply(gate_up, 1, n_gates + block, thread);
                      activate(block);
                    },
                    [this](int64_t thread) { keep_sum(1, thread); }},
                   {blocks(down), {}, [&](int64_t block, int64_t thread) { multiply(down, -1, block, thread); }, {}}},
                  n_threads_);
    phases.run();
  }

 private:
  static char* bytes(const Tensor& t) { return static_cast<char*>(t.mutable_data_ptr()); }

  // --- memory -------------------------------------------------------------------------------------------------------

  void allocate() {
    int64_t total = 0;
    const auto reserve = [&](int64_t n) {
      const int64_t begin = total;
      total += round_up(n, 64);
      return begin;
    };
    const int64_t row = n_rows_ * size_, q_width = n_heads_ * width_;
    const int64_t qkv = reserve(row * (q_width + 2 * n_kv_heads_ * width_)), q = reserve(row * q_width),
                  keys = reserve(pages_ ? row * n_kv_heads_ * width_ : 0), attended = reserve(row * q_width),
                  mid = reserve(row * dim_), stream = reserve(row * dim_), gate_up = reserve(row * 2 * hidden_),
                  gated = reserve(row * hidden_);
    const int64_t scratch = attention_forward_scratch(width_, width_, /*bias=*/false) * int64_t(sizeof(float));
    row_bytes_ = round_up(row * dim_, 64);
    thread_bytes_ = 2 * row_bytes_ + round_up(scratch, 64);
    const int64_t threads = reserve(n_threads_ * thread_bytes_);
    memory_ = at::empty({total}, stream_in_.options().dtype(at::kByte));
    char* base = bytes(memory_);
    qkv_ = base + qkv, q_ = base + q, keys_ = base + keys, attended_ = base + attended, branch_mid_ = base + mid;
    stream_mid_ = base + stream, gate_up_ = base + gate_up, gated_ = base + gated, threads_ = base + threads;
  }

  // Per-thread memory: the norm's result, the sum that it normalises, and attention's scratch.
  char* normed(int64_t thread) const { return threads_ + thread * thread_bytes_; }
  char* sum(int64_t thread) const { return normed(thread) + row_bytes_; }
  float* scratch(int64_t thread) const { return reinterpret_cast<float*>(sum(thread) + row_bytes_); }

  // --- matmuls ------------------------------------------------------------------------------------------------------

  // A matmul of the rows that each thread has normalised.
  DecodeLinear product(char* y, std::initializer_list<Weight> which) const { return product(nullptr, y, which); }
  DecodeLinear product(const char* x, char* y, std::initializer_list<Weight> which) const {
    DecodeLinear args{};
    for (const Weight i : which) {
      args.matrices[args.n_matrices++] = {weights_[i].const_data_ptr(), weights_[i].stride(0), weights_[i].size(0)};
      args.n_cols += weights_[i].size(0);
      args.width = weights_[i].size(1);
    }
    args.x = x;
    args.y = y;
    args.n_rows = n_rows_;
    args.type = type_;
    args.widens = !bfloat16_choice().pairs;
    return args;
  }

  static int64_t blocks(const DecodeLinear& product) {
    int64_t n = 0;
    for (int i = 0; i < product.n_matrices; ++i) n += product.matrices[i].blocks();
    return n;
  }

  // --- norms --------------------------------------------------------------------------------------------------------

  void set_norm(int i, const BlockOptions& options) {
    RmsNormForward& args = norm_[i];
    args.weight = norms_[i].const_data_ptr<float>();
    args.rows.size[kRowRank - 1] = n_rows_;
    args.x_strides.stride[kRowRank - 1] = args.residual_strides.stride[kRowRank - 1] = dim_;
    args.n_cols = dim_;
    args.eps = static_cast<float>(options.eps);
    args.round_before_weight = options.round_before_weight;
    args.x_type = args.y_type = type_;
  }

  // Every thread normalises all rows itself: that is faster than waiting for another thread.
  void normalize(int i, int64_t thread) const {
    RmsNormForward args = norm_[i];
    const void* branch = i == 1 ? branch_mid_ : branch_in_.defined() ? branch_in_.const_data_ptr() : nullptr;
    const void* stream = i == 1 && branch_in_.defined() ? stream_mid_ : stream_in_.const_data_ptr();
    args.x = branch ? branch : stream;
    args.residual = branch ? stream : nullptr;
    args.y = normed(thread);
    args.h = branch ? sum(thread) : nullptr;
    FK_CHOOSE_ISA(rms_norm_forward)(args, 0, n_rows_);
  }

  void keep_sum(int i, int64_t thread) const {
    if (i == 1 || branch_in_.defined())
      std::memcpy(i == 1 ? bytes(stream_out_) : stream_mid_, sum(thread), n_rows_ * dim_ * size_);
  }

  // --- attention ----------------------------------------------------------------------------------------------------

  void set_rope(const BlockOptions& options) {
    const int64_t token = (n_heads_ + 2 * n_kv_heads_) * width_;
    const RopeStrides packed{tokens_ * token, width_, token};
    rope_.tables = rope_tables(cos_, sin_, {});
    rope_.tables.cos = static_cast<const char*>(rope_.tables.cos) + start_ * cos_.stride(0) * cos_.element_size();
    rope_.tables.sin = static_cast<const char*>(rope_.tables.sin) + start_ * sin_.stride(0) * sin_.element_size();
    rope_.tables.n_rows -= start_;
    rope_.n_tokens = tokens_;
    rope_.all_tokens = n_rows_;
    rope_.width = width_;
    rope_.interleaved = options.interleaved;
    rope_.type = type_;
    rope_.heads[0] = {qkv_, q_, n_heads_, packed, {tokens_ * n_heads_ * width_, width_, n_heads_ * width_}};
    rope_.heads[1] = {qkv_ + n_heads_ * width_ * size_, keys_, n_kv_heads_, packed, {n_kv_heads_ * width_, width_, 0}};
    if (pages_) {
      rope_.tables.positions = pages_.positions().data();
      rope_.tables.position_batch_stride = 1;
    } else {
      rope_.heads[1].y = cached(k_cache_);
      rope_.heads[1].y_strides = rope_strides(k_cache_);
    }
  }

  // The address of the first new position.
  char* cached(const Tensor& cache) const { return bytes(cache) + start_ * width_ * size_; }

  // Few rows of queries and keys: one thread handles them before the others continue.
  void append() const {
    FK_CHOOSE_ISA(rope)(rope_, 0, n_rows_);
    const RopeHeads& keys = rope_.heads[1];
    const char* new_values = static_cast<const char*>(keys.x) + n_kv_heads_ * width_ * size_;
    if (pages_) {
      pages_.store(keys_, n_kv_heads_ * width_ * size_, k_cache_);
      pages_.store(new_values, keys.x_strides.batch * size_, v_cache_);
      return;
    }
    char* values = cached(v_cache_);
    for (int64_t b = 0; b < batch_; ++b)
      for (int64_t h = 0; h < n_kv_heads_; ++h)
        for (int64_t t = 0; t < tokens_; ++t)
          std::memcpy(values + keys.y_strides.offset(b, h, t) * size_,
                      new_values + keys.x_strides.offset(b, h, t) * size_, width_ * size_);
  }

  void set_attention(const BlockOptions& options) {
    AttentionForward& a = attention_;
    for (int64_t b = 0; b < batch_; ++b)
      sequences_.push_back({b, 0, tokens_, 0, pages_ ? pages_.positions()[b] + 1 : start_ + tokens_});
    a.pages = pages_.pages();
    a.q = q_;
    a.k = k_cache_.const_data_ptr();
    a.v = v_cache_.const_data_ptr();
    a.out = attended_;
    a.q_strides = a.out_strides = {tokens_ * n_heads_ * width_, width_, n_heads_ * width_};
    a.k_strides = a.v_strides = pages_ ? page_strides(k_cache_) : head_strides(k_cache_);
    a.sequences = sequences_.data();
    a.group = n_heads_ / n_kv_heads_;
    a.head_dim = a.head_dim_v = width_;
    a.scale = static_cast<float>(options.scale);
    a.window_left = options.window_left ? std::min(options.window_left->expect_int(), kUnbounded) : kUnbounded;
    a.window_right = 0;
    a.bottom_right = true;
    a.type = type_;
    a.widens = attention_widens(false);
    tasks_ = forward_tasks(a, batch_, n_kv_heads_);
    if (tasks_.num_splits == 1) return;
    splits_ = at::empty({n_attention_tasks(), kTaskRows, attention_split_size(width_)}, at::kFloat);
    a.splits = splits_.mutable_data_ptr<float>();
    splits_done_ = std::vector<std::atomic<int64_t>>(n_attention_tasks() / tasks_.num_splits);
  }

  int64_t n_attention_tasks() const { return static_cast<int64_t>(tasks_.tasks.size()); }

  void attend(int64_t i, int64_t thread) {
    const int64_t num_splits = tasks_.num_splits, rows = i / num_splits;
    FK_CHOOSE_ISA_OF(attention_isa(false), attention_forward)(attention_, tasks_.tasks[i], scratch(thread));
    if (num_splits > 1 && splits_done_[rows].fetch_add(1, std::memory_order_acq_rel) == num_splits - 1)
      FK_CHOOSE_ISA(attention_combine)(attention_, tasks_.tasks[rows * num_splits], num_splits);
  }

  // --- the gate -----------------------------------------------------------------------------------------------------

  // Handles the columns of a block, whose gate and up the same thread has just computed.
  void activate(int64_t block) const {
    const int64_t first = block * kDecodeLinearBlock;
    GluForward args{};
    args.n_cols = std::min(kDecodeLinearBlock, hidden_ - first);
    args.activation = activation_;
    args.type = type_;
    for (int64_t row = 0; row < n_rows_; ++row) {
      const char* gate = gate_up_ + (row * 2 * hidden_ + first) * size_;
      args.gate = gate;
      args.up = gate + hidden_ * size_;
      args.y = gated_ + (row * hidden_ + first) * size_;
      FK_CHOOSE_ISA(glu_forward)(args, GluOptions(), 0, tiles_a_row(args.n_cols));
    }
  }

  Dtype type_;
  int64_t size_;
  BlockPages pages_;
  int64_t batch_, tokens_, n_rows_, dim_, n_heads_, n_kv_heads_, width_, hidden_, start_, n_threads_ = 1;
  Tensor branch_in_, stream_in_, cos_, sin_, k_cache_, v_cache_, branch_out_, stream_out_;
  std::array<Tensor, kWeights> weights_;
  std::array<Tensor, 2> norms_;
  RmsNormForward norm_[2]{};
  Rope rope_{};
  AttentionForward attention_{};
  std::vector<AttentionSequence> sequences_;
  ForwardTasks tasks_;
  std::vector<std::atomic<int64_t>> splits_done_;
  Activation activation_;
  Tensor memory_, splits_;
  char *qkv_, *q_, *keys_, *attended_, *branch_mid_, *stream_mid_, *gate_up_, *gated_, *threads_;
  int64_t row_bytes_, thread_bytes_;
};

std::tuple<Tensor, Tensor> block_cpu(const OptionalTensor& branch, const Tensor& stream, at::TensorList weights,
                                     at::TensorList norms, const Tensor& cos, const Tensor& sin, const Tensor& k_cache,
                                     const Tensor& v_cache, const BlockOptions& options) {
  auto result = check_and_make(branch, stream, weights, norms, cos, sin, k_cache, v_cache, options);
  const auto& [branch_out, stream_out] = result;
  TORCH_CHECK_VALUE(!at::GradMode::is_enabled(), "decode_block has no gradient; use torch.no_grad()");
  TORCH_CHECK_VALUE(k_cache.is_contiguous() && v_cache.is_contiguous(), "k_cache and v_cache must be contiguous");
  const int64_t most = options.block_table ? kMostPagedRows : kMostRows;
  TORCH_CHECK_VALUE(stream.numel() <= most * stream.size(2), "stream must have at most ", most, " rows; got ",
                    stream.sizes());
  if (stream.numel() == 0) return result;
  Block(branch, stream, weights, norms, cos, sin, k_cache, v_cache, options, branch_out, stream_out).run();
  for (const Tensor* cache : {&k_cache, &v_cache})
    if (!cache->is_inference()) cache->unsafeGetTensorImpl()->bump_version();
  return result;
}

}  // namespace decode_block_cpu

std::tuple<Tensor, Tensor> decode_block(const OptionalTensor& branch, const Tensor& stream, at::TensorList weights,
                                        at::TensorList norms, const Tensor& cos, const Tensor& sin,
                                        const Tensor& k_cache, const Tensor& v_cache, const BlockOptions& options) {
  static const Operator<decltype(decode_block_cpu::block_cpu)> op(FK_LIBRARY_NAME "::decode_block");
  return op(branch, stream, weights, norms, cos, sin, k_cache, v_cache, options);
}

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  define_operator(m,
                  "decode_block(Tensor? branch, Tensor stream, Tensor[] weights, Tensor[] norms, Tensor cos, Tensor "
                  "sin, Tensor(a!) k_cache, Tensor(b!) v_cache, " +
                      BlockOptions::schema() + ") -> (Tensor branch, Tensor stream)");
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CPU, m) { m.impl("decode_block", flat_kernel<&decode_block_cpu::block_cpu>); }

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) { m.impl("decode_block", flat_kernel<&decode_block_cpu::check_and_make>); }

TORCH_LIBRARY_IMPL(FK_LIBRARY, Autograd, m) { m.impl("decode_block", torch::CppFunction::makeFallthrough()); }

}  // namespace foundry
