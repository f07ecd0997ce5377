// The Python module foundry_kernels._C: build information, and hooks for tests. Importing it also registers the
// operators of csrc/torch with PyTorch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/flash_attention_tasks.h"
#include "cpu/isa.h"
#include "cpu/processor.h"
#include "cpu/product_rates.h"
#include "direct.h"
#include "torch/numbers.h"
#include "torch/products.h"
#include "triton_calls.h"

namespace {

using foundry::Isa;

std::vector<std::string> compiled_isas() {
  std::vector<std::string> names{foundry::isa_name(Isa::lowest)};
  FK_IF_AVX2(names.push_back("avx2");)
  FK_IF_AVX512(names.push_back("avx512");)
  FK_IF_AVX512_BF16(names.push_back("avx512_bf16");)
  FK_IF_AMX_BF16(names.push_back("amx_bf16");)
  FK_IF_NEON_BF16(names.push_back("neon_bf16");)
  return names;
}

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "g++ " __VERSION__;
#endif
}

pybind11::dict build_info() {
  pybind11::dict info;
  info["compiler"] = compiler();
  info["torch"] = TORCH_VERSION;
  info["instruction_sets"] = compiled_isas();
  std::vector<std::string> usable;
  for (const Isa isa : foundry::kIsas)
    if (foundry::isa_usable(isa)) usable.push_back(foundry::isa_name(isa));
  info["usable_instruction_sets"] = usable;
  info["instruction_set"] = foundry::isa_name(foundry::chosen_isa());
  info["processor"] = foundry::processor_isa();
  std::vector<std::string> products;
  if (foundry::fast_bfloat16_products()) products.push_back("bfloat16");
  if (foundry::fast_float16_products()) products.push_back("float16");
  if (foundry::fast_float32_products()) products.push_back("float32");
  info["fast_products"] = products;
  products.clear();
  if (foundry::own_bfloat16_products()) products.push_back("bfloat16");
  if (!foundry::fast_float32_products()) products.push_back("float32");
  info["own_products"] = products;  // whether csrc/cpu/matmul.h replaces them
  info["cuda_architectures"] = FK_CUDA_ARCHITECTURES;
#if defined(FK_HAVE_HOPPER)
  info["hopper"] = true;  // csrc/cuda/hopper is compiled in
#else
  info["hopper"] = false;
#endif
  return info;
}

pybind11::dict limits() {
  pybind11::dict found;
  found["smallest"] = foundry::kSmallest;
  found["largest"] = foundry::kLargest;
  found["max_head_dim"] = foundry::kMaxHeadDim;
  return found;
}

void force_instruction_set(const std::string& name) {
  for (const Isa isa : foundry::kIsas) {
    if (name != foundry::isa_name(isa)) continue;
    if (!foundry::isa_usable(isa)) throw std::invalid_argument("instruction set " + name + " is not usable here");
    return foundry::force_isa(isa);
  }
  throw std::invalid_argument("unknown instruction set " + name);
}

pybind11::dict processor() {
  const foundry::Processor found = foundry::processor();
  pybind11::dict facts;
  facts["vendor"] = found.vendor;
  facts["family"] = found.family;
  facts["model"] = found.model;
  facts["stepping"] = found.stepping;
  facts["instruction_set"] = foundry::processor_isa();
  return facts;
}

void choose_bfloat16(bool tiles, bool pairs, bool products) { foundry::choose_bfloat16({tiles, pairs, products}); }

std::tuple<bool, bool, bool> bfloat16_choice() {
  const foundry::Bfloat16Choice choice = foundry::bfloat16_choice();
  return {choice.tiles, choice.pairs, choice.products};
}

// Seconds of the same bfloat16 matmuls by each method, on one thread.
pybind11::dict measure_bfloat16() {
  pybind11::dict seconds;
  const foundry::ProductSeconds found = FK_CHOOSE_ISA(product_seconds)();
  seconds["float32"] = found.float32;
  seconds["pairs"] = found.pairs;
  seconds["products"] = foundry::onednn_bfloat16_seconds();
  return seconds;
}

using Lengths = std::vector<int64_t>;

// Attention's tasks for sequences of these lengths. Rows are [1:3], keys [3:5]; each task is (sequence, kv_head,
// row_begin, row_end, key_begin, key_end, work, ...). For the 16-bit backward pass also the tasks that wait for it, and
// the offsets of its head's sums and of its rows' sums.
pybind11::dict attention_tasks(const Lengths& q_lens, const Lengths& k_lens, int64_t n_kv_heads, int64_t group,
                               std::optional<int64_t> window_left, std::optional<int64_t> window_right,
                               bool bottom_right, int64_t threads) {
  if (q_lens.size() != k_lens.size()) throw std::invalid_argument("q_lens and k_lens must have equal lengths");
  std::vector<foundry::AttentionSequence> sequences;
  for (size_t n = 0; n < q_lens.size(); ++n) sequences.push_back({0, 0, q_lens[n], 0, k_lens[n]});
  foundry::AttentionBackward a{};
  a.sequences = sequences.data();
  a.group = group;
  a.window_left = std::min(window_left.value_or(foundry::kUnbounded), foundry::kUnbounded);
  a.window_right = std::min(window_right.value_or(foundry::kUnbounded), foundry::kUnbounded);
  a.bottom_right = bottom_right;
  a.type = foundry::Dtype::bf16;
  a.head_dim = a.head_dim_v = 64;
  a.dq = a.dk = a.dv = &a;  // requested
  const int64_t n_sequences = static_cast<int64_t>(sequences.size());
  std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>> forward;
  for (const auto& t : foundry::forward_tasks(a, n_sequences, n_kv_heads).tasks)
    forward.emplace_back(
        t.sequence, t.kv_head, t.row_begin, t.row_end, t.key_begin, t.key_end,
        foundry::attention_work(a, sequences[t.sequence], t.row_begin, t.row_end, t.key_begin, t.key_end));
  std::vector<std::array<int64_t, 11>> backward;
  for (const auto& t : foundry::backward_tasks(a, n_sequences, n_kv_heads, threads).tasks)
    backward.push_back({t.sequence, t.kv_head, t.row_begin, t.row_end, t.key_begin, t.key_end, t.work, t.next_of_rows,
                        t.next_of_keys, t.sums, t.row_sums});
  pybind11::dict tasks;
  tasks["forward"] = forward;
  tasks["backward"] = backward;
  return tasks;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  if (!foundry::isa_usable(Isa::lowest)) {
    const std::string needed = foundry::isa_name(Isa::lowest), has = foundry::processor_isa();
    throw pybind11::import_error("it was compiled for processors with " + needed + "; this processor has " + has);
  }
  m.def("build_info", &build_info, "How the extension was built, and which instructions it and oneDNN use.");
  m.def("limits", &limits, "The allowed values of numeric options and sizes.");
  m.def("processor", &processor, "Which processor this is.");
  m.def("choose_bfloat16", &choose_bfloat16, "Sets which instructions compute bfloat16 matmuls: csrc/cpu/processor.h.");
  m.def("bfloat16_choice", &bfloat16_choice, "(tiles, pairs, products) as chosen.");
  m.def("measure_bfloat16", &measure_bfloat16,
        "Seconds of the same matmuls in float32 and with bfloat16 instructions.");
  m.def("force_instruction_set", &force_instruction_set, "For tests: run the CPU kernels of this instruction set.");
  m.def("attention_tasks", &attention_tasks, "For tests: the tasks of the CPU kernels of attention.");
  auto direct = m.def_submodule("direct", "Calls of the operators on plain tensors, without torch's binding.");
  if (PyModule_AddFunctions(direct.ptr(), foundry::direct_calls()) != 0) throw pybind11::error_already_set();
  m.def("serve_on_accelerator", &foundry::serve_on_accelerator, "Sets which GPU calls the direct call handles.");
  m.def("attention_gpus", &foundry::attention_gpus, "Sets whether the CUDA kernels of attention support the GPUs.");
  m.def("set_single_chunk", &foundry::set_single_chunk, "Sets what a direct linear_cross_entropy makes at once.");
  m.def("get_single_chunk", &foundry::get_single_chunk, "For tests: (multiplications, tokens) as set.");
  m.def("accelerator", &foundry::accelerator, "For tests: sets the device type that counts as a GPU.");
  auto triton = m.def_submodule("triton", "Argument queries of Triton kernel calls.");
  if (PyModule_AddFunctions(triton.ptr(), foundry::triton_calls()) != 0) throw pybind11::error_already_set();
}
