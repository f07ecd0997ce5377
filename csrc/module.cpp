// The Python module foundry_kernels._C: facts about how it was built. Importing it also registers the operators of
// csrc/torch with PyTorch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/isa.h"

namespace {

using foundry::Isa;

std::vector<std::string> compiled_isas() {
  std::vector<std::string> names{foundry::isa_name(Isa::lowest)};
  FK_IF_AVX2(names.push_back("avx2");)
  FK_IF_AVX512(names.push_back("avx512");)
  FK_IF_AVX512_BF16(names.push_back("avx512_bf16");)
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
  info["cuda_architectures"] = FK_CUDA_ARCHITECTURES;
  return info;
}

void force_instruction_set(const std::string& name) {
  for (const Isa isa : foundry::kIsas) {
    if (name != foundry::isa_name(isa)) continue;
    if (!foundry::isa_usable(isa)) throw std::invalid_argument("instruction set " + name + " is not usable here");
    return foundry::force_isa(isa);
  }
  throw std::invalid_argument("unknown instruction set " + name);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("build_info", &build_info, "How the extension was built and which instruction set it chose.");
  m.def("force_instruction_set", &force_instruction_set, "For tests: run the CPU kernels of this instruction set.");
}
