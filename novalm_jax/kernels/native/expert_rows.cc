// Rows times the matrices that they chose, as an XLA custom call on the CPU.
//
// Matrices are read where they lie in their stack, each about once for all rows that chose it. An output is added up
// in one order, whatever other rows there are, in whichever slot its matrix lies and however many threads help: lanes
// and their sum where a matrix has outputs first, one input after the other where it has inputs first. Threads are
// XLA's own; a call never waits for one that has not begun, so that calls on the same threads cannot block each other.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "pairs of bfloat16 are read as 32 bits");

typedef float Floats __attribute__((vector_size(64)));
typedef float HalfOfFloats __attribute__((vector_size(32)));
typedef float QuarterOfFloats __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Shorts __attribute__((vector_size(32)));

constexpr int kLanes = 16;
// Numbers that are read at a time.
constexpr int kStep = 2 * kLanes;
// Rows that a weight is multiplied with once it is read; more come in turns, while the weights lie in a cache.
constexpr int kRows = 4;
// Inputs that are added to an output before it is stored, in matrices with inputs first.
constexpr int kDepth = 8;
// Bytes of a matrix that a thread takes at a time.
constexpr int64_t kPart = 128 << 10;
// Outputs that a thread takes at a time of a matrix with inputs first, so that it reads some neighbours of each input.
constexpr int64_t kNeighbours = 512;
// Outputs that are computed side by side, of matrices with outputs first: memory gives several streams faster than one.
constexpr int kStreams = 4;
constexpr int kLine = 64;
// Bytes of a stream that are fetched ahead of those that are computed with.
constexpr int kAhead = 2048;

template <typename Vector, typename Number>
inline Vector Load(const Number* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

inline void Store(float* to, Floats vector) { std::memcpy(to, &vector, sizeof(vector)); }

struct Pair {
  Floats first, second;
};

// kStep weights; of bfloat16 those of even and those of odd places, as `Unpack` orders inputs.
inline Pair LoadStep(const float* from) { return {Load<Floats>(from), Load<Floats>(from + kLanes)}; }

inline Pair LoadStep(const uint16_t* from) {
  Words words = Load<Words>(from);
  return {(Floats)(words << 16), (Floats)(words & 0xffff0000u)};
}

// kLanes weights in order.
inline Floats LoadLanes(const float* from) { return Load<Floats>(from); }

inline Floats LoadLanes(const uint16_t* from) {
  return (Floats)(__builtin_convertvector(Load<Shorts>(from), Words) << 16);
}

inline float Sum(Floats v) {
  const float* lanes = reinterpret_cast<const float*>(&v);
  HalfOfFloats eight = Load<HalfOfFloats>(lanes) + Load<HalfOfFloats>(lanes + 8);
  lanes = reinterpret_cast<const float*>(&eight);
  QuarterOfFloats four = Load<QuarterOfFloats>(lanes) + Load<QuarterOfFloats>(lanes + 4);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

inline int64_t Padded(int64_t inputs) { return (inputs + kStep - 1) / kStep * kStep; }

// A row in float32, with zeros up to a whole step; in order, or as `LoadStep` has weights.
template <typename Number>
void Unpack(const Number* row, int64_t inputs, bool in_order, float* to) {
  auto unpack = [&](const Number* from, float* step) {
    Pair pair = in_order ? Pair{LoadLanes(from), LoadLanes(from + kLanes)} : LoadStep(from);
    Store(step, pair.first);
    Store(step + kLanes, pair.second);
  };
  int64_t i = 0;
  for (; i + kStep <= inputs; i += kStep) unpack(row + i, to + i);
  if (i == inputs) return;
  Number last[kStep] = {};
  std::memcpy(last, row + i, (inputs - i) * sizeof(Number));
  unpack(last, to + i);
}

inline void Prefetch(const void* line) { __builtin_prefetch(static_cast<const char*>(line) + kAhead); }

// Outputs `output`, `output + apart`, ... of some rows, of a matrix `[outputs, inputs]`.
template <int rows, int count, typename Weight>
inline void Dot(const float* const* x, const Weight* matrix, int64_t inputs, int64_t output, int64_t apart,
                float* const* out) {
  const Weight* weights[count];
  for (int o = 0; o < count; ++o) weights[o] = matrix + (output + o * apart) * inputs;
  const float* from[rows];
  std::copy(x, x + rows, from);
  Floats sums[count][rows] = {};
  auto add = [&](const Pair* pairs, int64_t i) {
    for (int r = 0; r < rows; ++r) {
      Floats first = Load<Floats>(from[r] + i), second = Load<Floats>(from[r] + i + kLanes);
      for (int o = 0; o < count; ++o) sums[o][r] += pairs[o].first * first;
      for (int o = 0; o < count; ++o) sums[o][r] += pairs[o].second * second;
    }
  };
  Pair pairs[count];
  int64_t i = 0;
  for (; i + kStep <= inputs; i += kStep) {
    for (int o = 0; o < count; ++o) {
      for (int line = 0; line < kStep; line += kLine / sizeof(Weight)) Prefetch(weights[o] + i + line);
      pairs[o] = LoadStep(weights[o] + i);
    }
    add(pairs, i);
  }
  if (i < inputs) {
    for (int o = 0; o < count; ++o) {
      Weight last[kStep] = {};
      std::memcpy(last, weights[o] + i, (inputs - i) * sizeof(Weight));
      pairs[o] = LoadStep(last);
    }
    add(pairs, i);
  }
  for (int o = 0; o < count; ++o) {
    for (int r = 0; r < rows; ++r) out[r][output + o * apart] = Sum(sums[o][r]);
  }
}

// Adds `depth` inputs from `input` on to outputs `begin` to `end` of some rows, of a matrix `[inputs, outputs]`. Whole
// steps of outputs are left as `LoadStep` has them.
template <int rows, typename Weight>
inline void AddInputs(const float* const* x, const Weight* matrix, int64_t input, int depth, int64_t outputs,
                      int64_t begin, int64_t end, float* const* out) {
  const Weight* weights = matrix + input * outputs;
  const float* from[rows];
  float* to[rows];
  for (int r = 0; r < rows; ++r) {
    from[r] = x[r] + input;
    to[r] = out[r];
  }
  int64_t o = begin;
  for (; o + kStep <= end; o += kStep) {
    Floats first[rows] = {}, second[rows] = {};
    for (int r = 0; r < rows && input; ++r) {
      first[r] = Load<Floats>(to[r] + o);
      second[r] = Load<Floats>(to[r] + o + kLanes);
    }
    for (int j = 0; j < depth; ++j) {
      for (int line = 0; line < kStep; line += kLine / sizeof(Weight)) {
        __builtin_prefetch(weights + (kDepth + j) * outputs + o + line);
      }
      Pair pair = LoadStep(weights + j * outputs + o);
      for (int r = 0; r < rows; ++r) {
        first[r] += pair.first * from[r][j];
        second[r] += pair.second * from[r][j];
      }
    }
    for (int r = 0; r < rows; ++r) {
      Store(to[r] + o, first[r]);
      Store(to[r] + o + kLanes, second[r]);
    }
  }
  if (o == end) return;
  for (int r = 0; r < rows; ++r) {
    float last[kStep] = {};
    if (input) std::memcpy(last, to[r] + o, (end - o) * sizeof(float));
    Floats first = Load<Floats>(last), second = Load<Floats>(last + kLanes);
    for (int j = 0; j < depth; ++j) {
      Weight some[kStep] = {};
      std::memcpy(some, weights + j * outputs + o, (end - o) * sizeof(Weight));
      first += LoadLanes(some) * from[r][j];
      second += LoadLanes(some + kLanes) * from[r][j];
    }
    Store(last, first);
    Store(last + kLanes, second);
    std::memcpy(to[r] + o, last, (end - o) * sizeof(float));
  }
}

// Puts whole steps of bfloat16, as `LoadStep` has them, in order.
inline void PutInOrder(float* numbers, int64_t count) {
  for (int64_t i = 0; i + kStep <= count; i += kStep) {
    float step[kStep];
    std::memcpy(step, numbers + i, sizeof(step));
    for (int j = 0; j < kStep; ++j) numbers[i + j] = step[j % 2 * kLanes + j / 2];
  }
}

// Rows that chose one matrix.
struct Group {
  const void* matrix;
  std::vector<const float*> x;
  std::vector<float*> out;
};

// Calls `body` with a number of rows that is known when this is compiled, and the first of them.
template <typename Body>
inline void ByRows(const Group& group, const Body& body) {
  int64_t count = group.x.size();
  for (int64_t row = 0; row < count; row += kRows) {
    switch (std::min<int64_t>(kRows, count - row)) {
      case 1: body(std::integral_constant<int, 1>(), row); break;
      case 2: body(std::integral_constant<int, 2>(), row); break;
      case 3: body(std::integral_constant<int, 3>(), row); break;
      default: body(std::integral_constant<int, kRows>(), row);
    }
  }
}

template <typename Weight>
void Multiply(const Group& group, bool inputs_first, int64_t inputs, int64_t outputs, int64_t begin, int64_t end) {
  const Weight* matrix = static_cast<const Weight*>(group.matrix);
  if (!inputs_first) {
    int64_t each = (end - begin) / kStreams, o = begin;
    for (; o < begin + each; ++o) {
      ByRows(group, [&](auto rows, int64_t row) {
        Dot<decltype(rows)::value, kStreams>(&group.x[row], matrix, inputs, o, each, &group.out[row]);
      });
    }
    for (o = begin + each * kStreams; o < end; ++o) {
      ByRows(group, [&](auto rows, int64_t row) {
        Dot<decltype(rows)::value, 1>(&group.x[row], matrix, inputs, o, 0, &group.out[row]);
      });
    }
    return;
  }
  for (int64_t i = 0; i < inputs; i += kDepth) {
    ByRows(group, [&](auto rows, int64_t row) {
      auto add = [&](int depth) {
        AddInputs<decltype(rows)::value>(&group.x[row], matrix, i, depth, outputs, begin, end, &group.out[row]);
      };
      if (inputs - i >= kDepth) {
        add(kDepth);
      } else {
        add(static_cast<int>(inputs - i));
      }
    });
  }
  if (sizeof(Weight) == sizeof(uint16_t)) {
    for (float* out : group.out) PutInOrder(out + begin, end - begin);
  }
}

// While it lives, denormal numbers are zeros, as in programs of XLA: on every thread, whoever made it.
class FlushDenormals {
 public:
  FlushDenormals() { Set(before_ | kFlush); }
  ~FlushDenormals() { Set(before_); }

 private:
#if defined(__SSE2__)
  static constexpr uint64_t kFlush = 0x8040;
  static uint64_t Get() { return __builtin_ia32_stmxcsr(); }
  static void Set(uint64_t flags) { __builtin_ia32_ldmxcsr(static_cast<uint32_t>(flags)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kFlush = 1 << 24;
  static uint64_t Get() {
    uint64_t flags;
    asm volatile("mrs %0, fpcr" : "=r"(flags));
    return flags;
  }
  static void Set(uint64_t flags) { asm volatile("msr fpcr, %0" : : "r"(flags)); }
#else
#error "expert rows: neither x86-64 nor arm64"
#endif
  const uint64_t before_ = Get();
};

// What the threads of one call share. Those that come when nothing is left touch nothing but `next`.
struct Work {
  std::vector<Group> groups;
  bool narrow, inputs_first;
  int64_t inputs, outputs, part, parts;
  std::atomic<int64_t> next{0}, done{0};

  int64_t size() const { return parts * static_cast<int64_t>(groups.size()); }

  void Run() {
    FlushDenormals flush;
    int64_t item;
    while ((item = next.fetch_add(1, std::memory_order_relaxed)) < size()) {
      const Group& group = groups[item / parts];
      int64_t begin = item % parts * part, end = std::min(begin + part, outputs);
      if (narrow) {
        Multiply<uint16_t>(group, inputs_first, inputs, outputs, begin, end);
      } else {
        Multiply<float>(group, inputs_first, inputs, outputs, begin, end);
      }
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

std::string Shape(ffi::AnyBuffer::Dimensions dimensions) {
  std::string text = "[";
  for (int64_t size : dimensions) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

// x [t, i] and stack [s, o, i] or [s, i, o], bits of bfloat16 or float32; int32 slots [n], negative for none, of which
// `choices` follow one another for each row of x. Gives float32 [n, o], and float32 [t, i up to a whole step], which is
// of no use afterwards.
ffi::Error ExpertRows(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer slots, ffi::AnyBuffer stack,
                      int64_t choices, bool inputs_first, ffi::Result<ffi::AnyBuffer> out,
                      ffi::Result<ffi::AnyBuffer> unpacked) {
  auto rows = x.dimensions(), chosen = slots.dimensions(), matrices = stack.dimensions();
  std::string shapes = "x " + Shape(rows) + ", slots " + Shape(chosen) + ", stack " + Shape(matrices) + ", " +
                       std::to_string(choices) + " choices";
  if (rows.size() != 2 || chosen.size() != 1 || matrices.size() != 3 || choices < 1 ||
      chosen[0] != rows[0] * choices || rows[1] != matrices[inputs_first ? 1 : 2]) {
    return ffi::Error::InvalidArgument("expert rows: shapes do not match: " + shapes);
  }
  if ((x.element_type() != ffi::U16 && x.element_type() != ffi::F32) || stack.element_type() != x.element_type() ||
      slots.element_type() != ffi::S32 || out->element_type() != ffi::F32 || unpacked->element_type() != ffi::F32) {
    return ffi::Error::InvalidArgument("expert rows: x and stack are both uint16 or both float32, slots are int32");
  }
  int64_t inputs = rows[1], outputs = matrices[inputs_first ? 2 : 1], padded = Padded(inputs);
  if (static_cast<int64_t>(out->element_count()) != chosen[0] * outputs ||
      static_cast<int64_t>(unpacked->element_count()) != rows[0] * padded) {
    return ffi::Error::InvalidArgument("expert rows: results have other shapes than " + shapes);
  }
  const int32_t* slot = slots.typed_data<int32_t>();
  for (int64_t n = 0; n < chosen[0]; ++n) {
    if (slot[n] >= matrices[0]) {
      return ffi::Error::InvalidArgument("expert rows: slot " + std::to_string(slot[n]) + " of " +
                                         std::to_string(matrices[0]));
    }
  }

  auto work = std::make_shared<Work>();
  work->narrow = stack.element_type() == ffi::U16;
  work->inputs_first = inputs_first;
  work->inputs = inputs;
  work->outputs = outputs;
  float* wide = unpacked->typed_data<float>();
  for (int64_t row = 0; row < rows[0]; ++row) {
    if (work->narrow) {
      Unpack(x.typed_data<uint16_t>() + row * inputs, inputs, inputs_first, wide + row * padded);
    } else {
      Unpack(x.typed_data<float>() + row * inputs, inputs, inputs_first, wide + row * padded);
    }
  }
  std::vector<int64_t> order(chosen[0]);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return slot[a] < slot[b]; });
  int64_t width = work->narrow ? sizeof(uint16_t) : sizeof(float), last = -1;
  for (int64_t n : order) {
    float* result = out->typed_data<float>() + n * outputs;
    if (slot[n] < 0 || inputs == 0) {
      std::fill(result, result + outputs, 0.0f);
      continue;
    }
    if (slot[n] != last) {
      last = slot[n];
      work->groups.push_back({static_cast<const char*>(stack.untyped_data()) + last * inputs * outputs * width, {}, {}});
    }
    work->groups.back().x.push_back(wide + n / choices * padded);
    work->groups.back().out.push_back(result);
  }
  int64_t part = std::max(kPart / std::max<int64_t>(1, inputs * width), inputs_first ? kNeighbours : 1);
  work->part = (part + kStep - 1) / kStep * kStep;
  work->parts = (outputs + work->part - 1) / work->part;

  // What one thread reads at once is done before another one has begun.
  int64_t bytes = static_cast<int64_t>(work->groups.size()) * inputs * outputs * width;
  int64_t helpers = std::min({threads.num_threads(), work->size(), 1 + bytes / kPart}) - 1;
  for (int64_t i = 0; i < helpers; ++i) threads.Schedule([work] { work->Run(); });
  work->Run();
  while (work->done.load(std::memory_order_acquire) < work->size()) std::this_thread::yield();
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(novalm_expert_rows, ExpertRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Attr<int64_t>("choices")
                                  .Attr<bool>("inputs_first")
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
