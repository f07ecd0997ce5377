// The activations that kernels support.
#pragma once

namespace foundry {

enum class Activation { silu, gelu, gelu_tanh, sigmoid, relu };

}  // namespace foundry
