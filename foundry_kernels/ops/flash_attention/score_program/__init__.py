"""Score functions: what a caller's `score_mod(score, b, h, q_idx, kv_idx)` computes, as a short list of instructions.

`trace` runs the function once on stand-ins and returns a `Program` and the captured tensors. `derive` gives its
derivatives as a program in the same language, `evaluate` computes either by PyTorch and thereby defines the result. The
C++ kernels interpret `Program.encode()`; Triton's kernels are printed from the `Program`.

**Values.** A program is a list of `Instruction`, each of which computes one number for each pair of a query and a key
from earlier ones. Its kind is "float" (float32, or float64 where q is float64, whatever the dtype of q otherwise),
"int" (32 bits; a program whose integers do not fit has undefined results) or "bool". `depends` says what the value
varies with: bits `ON_SCORE`, `ON_B`, `ON_H`, `ON_Q`, `ON_K`. A value without ON_Q and ON_K and ON_SCORE is one number
for a head, without ON_K and ON_SCORE one for a row, without ON_Q and ON_SCORE one for a column; without ON_SCORE it is
the same in the forward and the backward pass. Outputs may also depend on less than a pair: `Program.constant` gives the
value of one that is a constant (a derivative that is 1 or 0 everywhere, for example).

**Inputs.** `score` is the scaled product after the soft cap, ALiBi and the bias, in natural units; masks come after the
program, and hide what it returns. `b` is the number of the sequence (batch entry, or packed sequence), `h` the query
head, `q` and `k` the row and the column within the sequence, from 0, not aligned: q = 0 in decoding.

**Operations** (number = place in `OPS`; operands have the value's kind unless noted):

=================  ===========================================================================================
score b h q k      the inputs; score is a float, the others are ints
const              a number, of any kind
load               an element of a captured tensor at int indices, converted to the slot's kind. A negative index
                   counts from the end of its dimension; then what is outside is moved to the nearest inside.
                   Bit i of `negative` is set where index i may be negative; else it is known not to be.
                   Without indices, a tensor without dimensions. No element is read where the tensor has none: 0.
float              of an int
int                of a bool, or of a float, towards 0: NaN gives 0, and the result is at most 2^30 in size
detach             the operand, whose derivative is 0
neg abs            float or int
exp .. floor       float -> float: exp exp2 log log2 sqrt rsqrt tanh sigmoid sin cos floor
add sub mul        float or int
div                float
floordiv mod       int, as in Python: rounded down, the remainder of the divisor's sign; by 0 they are 0
pow                float
min max            float or int; NaN if one operand is
lt le eq           bool, of two floats or two ints; false where one is NaN
and or xor not     bool, or int by its bits
where              (condition: bool, a, b): a or b of the value's kind
=================  ===========================================================================================

**Encoding** (`Program.encode`, a flat list of int64; operators get that of the program followed by that of its
derivatives)::

    n_slots n_instructions n_outputs
    kind rank                                    for each slot (kinds: 0 bool, 1 int, 2 float)
    op kind depends n operand[0 .. n - 1]        for each instruction
    instruction                                  for each output

The operands are numbers of earlier instructions, except: `const` has one, the number itself (of a float the 64 bits of
the double); `load` has slot, negative, then the instructions of its indices, as many as the slot's rank. The tensors,
one for each slot, are passed beside the list as they are: any strides, any floating dtype ("float"), any integer dtype
("int"), or bool.

**Derivatives.** ``derive(program)`` has the outputs: the result, its derivative by the score, and for each load of
``program.loads()`` (those of floating tensors, in the order of the list) the derivative by the loaded number. With ds,
the gradient of the result, that of the score is ``ds * output 1``, and ``ds * output 2 + i`` is added to the element
that load i read. Where ds is 0, as it is for hidden pairs and for results of -inf, the product is 0 too, whatever the
derivative is.
"""

from foundry_kernels.ops.flash_attention.score_program import functions  # noqa: F401  (fills `trace.FUNCTIONS`)
