// The activations that kernels have.
#pragma once

namespace foundry {

enum class Activation { silu, gelu, gelu_tanh, sigmoid, relu };

}  // namespace foundry
