// Rows times the matrices that they chose, of one stack or several, as an XLA custom call on the CPU.
//
// Matrices are read where they lie in their stack, each about once for all rows that chose it. What comes out does not
// depend on the slot in which a matrix lies, nor on the other stacks.

#include <numeric>

#include "tiles.h"

namespace novalm {
namespace {

// Outputs that a thread takes at a time of a matrix with inputs first, so that it reads some neighbours of each input.
constexpr int64_t kNeighbours = 512;

// Outputs of a group that a thread computes at a time.
struct Part {
  int64_t group, begin, end;
};

template <typename Kind>
struct Products {
  std::vector<Group> groups;
  std::vector<int64_t> outputs;
  std::vector<Part> parts;
  int64_t inputs;
  bool inputs_first;

  void operator()(int64_t item) const {
    const Part& part = parts[item];
    const Group& group = groups[part.group];
    if (!inputs_first) return Kind::Multiply(group, inputs, part.begin, part.end);
    using Weight = typename Kind::Weight;
    MultiplyInputsFirst<Weight>(group, inputs, outputs[part.group], part.begin, part.end, true);
    for (float* out : group.out) PutInOrder<Weight>(out + part.begin, part.end - part.begin);
  }
};

// A stack of matrices, and where its products go.
struct Stack {
  const void* matrices;
  int64_t outputs;
  float* out;
};

template <typename Kind, typename Weight = typename Kind::Weight>
void Multiply(ffi::ThreadPool threads, const Weight* x, const int32_t* slots, int64_t count, int64_t choices,
              const std::vector<Stack>& stacks, bool inputs_first, int64_t inputs, float* packed) {
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return slots[a] < slots[b]; });
  Products<Kind> products{{}, {}, {}, inputs, inputs_first};
  int64_t row_bytes = std::max<int64_t>(1, inputs * sizeof(Weight)), bytes = 0;
  int64_t part = std::max(kPart / row_bytes, inputs_first ? kNeighbours : 1);
  part = (part + kStep - 1) / kStep * kStep;
  for (auto n = order.begin(), next = n; n != order.end(); n = next) {
    int32_t slot = slots[*n];
    while (next != order.end() && slots[*next] == slot) ++next;
    if (slot < 0 || inputs == 0) {
      for (const Stack& stack : stacks) {
        for (auto i = n; i != next; ++i) std::fill_n(stack.out + *i * stack.outputs, stack.outputs, 0.0f);
      }
      continue;
    }
    Group group{nullptr, {}, {}};
    std::vector<const Weight*> rows;
    for (auto i = n; i != next; ++i, packed += Padded(inputs)) {
      rows.push_back(x + *i / choices * inputs);
      group.packed.push_back(packed);
    }
    if (inputs_first) {
      for (size_t row = 0; row < rows.size(); ++row) Unpack(rows[row], inputs, true, group.packed[row]);
    } else {
      Kind::Pack(rows, inputs, group);
    }
    for (const Stack& stack : stacks) {
      group.matrix = static_cast<const Weight*>(stack.matrices) + slot * inputs * stack.outputs;
      group.out.clear();
      for (auto i = n; i != next; ++i) group.out.push_back(stack.out + *i * stack.outputs);
      for (int64_t begin = 0; begin < stack.outputs; begin += part) {
        products.parts.push_back(
            {static_cast<int64_t>(products.groups.size()), begin, std::min(begin + part, stack.outputs)});
      }
      products.groups.push_back(group);
      products.outputs.push_back(stack.outputs);
      bytes += stack.outputs * row_bytes;
    }
  }
  int64_t size = products.parts.size();
  InParallel(threads, size, bytes, std::move(products));
}

// x [t, i] and stacks [s, o, i] or [s, i, o], all bfloat16 (or its bits) or all float32; int32 slots [n], negative for
// none, of which `choices` follow one another for each row of x. Gives float32 [n, i up to a whole step], which is of no
// use afterwards, and float32 [n, o] of each stack.
ffi::Error MatrixRows(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer slots, ffi::RemainingArgs stacks,
                      int64_t choices, bool inputs_first, ffi::Result<ffi::AnyBuffer> packed,
                      ffi::RemainingRets outs) {
  auto rows = x.dimensions(), chosen = slots.dimensions();
  auto mismatch = [&] {
    std::string shapes = "x " + Shape(rows) + ", slots " + Shape(chosen) + ", " + std::to_string(choices) + " choices";
    for (size_t i = 0; i < stacks.size(); ++i) {
      shapes += ", stack " + Shape(stacks.get<ffi::AnyBuffer>(i)->dimensions());
    }
    return ffi::Error::InvalidArgument("matrix rows: shapes do not match: " + shapes);
  };
  if (rows.size() != 2 || chosen.size() != 1 || choices < 1 || chosen[0] != rows[0] * choices ||
      stacks.size() != outs.size() ||
      static_cast<int64_t>(packed->element_count()) != chosen[0] * Padded(rows[1])) {
    return mismatch();
  }
  bool narrow = IsNarrow(x.element_type());
  auto known = [&](ffi::DataType type) { return narrow ? IsNarrow(type) : type == ffi::F32; };
  bool all_known = known(x.element_type()) && slots.element_type() == ffi::S32 && packed->element_type() == ffi::F32;
  const int32_t* slot = static_cast<const int32_t*>(slots.untyped_data());
  std::vector<Stack> found;
  for (size_t i = 0; i < stacks.size(); ++i) {
    ffi::AnyBuffer stack = *stacks.get<ffi::AnyBuffer>(i);
    ffi::Result<ffi::AnyBuffer> out = *outs.get<ffi::AnyBuffer>(i);
    auto matrices = stack.dimensions();
    if (matrices.size() != 3 || rows[1] != matrices[inputs_first ? 1 : 2]) return mismatch();
    int64_t outputs = matrices[inputs_first ? 2 : 1];
    if (static_cast<int64_t>(out->element_count()) != chosen[0] * outputs) return mismatch();
    all_known = all_known && known(stack.element_type()) && out->element_type() == ffi::F32;
    if (!all_known) break;
    for (int64_t n = 0; n < chosen[0]; ++n) {
      if (slot[n] >= matrices[0]) {
        return ffi::Error::InvalidArgument("matrix rows: slot " + std::to_string(slot[n]) + " of " +
                                           std::to_string(matrices[0]));
      }
    }
    found.push_back({stack.untyped_data(), outputs, out->typed_data<float>()});
  }
  if (!all_known) {
    return ffi::Error::InvalidArgument("matrix rows: x and stacks are all bfloat16 or all float32, slots are int32");
  }
  return ByKind(narrow, [&](auto kind) {
    using Kind = decltype(kind);
    Multiply<Kind>(threads, static_cast<const typename Kind::Weight*>(x.untyped_data()), slot, chosen[0], choices, found,
                   inputs_first, rows[1], packed->typed_data<float>());
    return ffi::Error::Success();
  });
}

}  // namespace
}  // namespace novalm

XLA_FFI_DEFINE_HANDLER_SYMBOL(novalm_matrix_rows, novalm::MatrixRows,
                              novalm::ffi::Ffi::Bind()
                                  .Ctx<novalm::ffi::ThreadPool>()
                                  .Arg<novalm::ffi::AnyBuffer>()
                                  .Arg<novalm::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Attr<int64_t>("choices")
                                  .Attr<bool>("inputs_first")
                                  .Ret<novalm::ffi::AnyBuffer>()
                                  .RemainingRets());
