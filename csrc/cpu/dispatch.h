// Turns a memory type known at run time into a template argument. Compiled once per instruction set.
#pragma once

#include "vec.h"

namespace foundry {
namespace FK_ISA {

// Calls f(T*) for the memory type. The pointer is null and only carries the type.
template <class F>
void with_type(Dtype type, F&& f) {
  switch (type) {
    case Dtype::f32: return f((float*)nullptr);
    case Dtype::bf16: return f((BFloat16*)nullptr);
    case Dtype::f16: return f((Half*)nullptr);
  }
}

}  // namespace FK_ISA
}  // namespace foundry
