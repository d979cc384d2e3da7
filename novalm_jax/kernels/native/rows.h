// Products of rows with a matrix in float32 or bfloat16, and how their parts are shared among threads.
//
// An output is added up in one order, whatever other rows there are and however many threads help: lanes and their sum
// where a matrix has outputs first, one input after the other where it has inputs first. Threads are XLA's own; nobody
// waits for one that has not begun, so that calls on the same threads cannot block each other.

#ifndef NOVALM_ROWS_H_
#define NOVALM_ROWS_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace novalm {

namespace ffi = xla::ffi;

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "pairs of bfloat16 are read as 32 bits");

typedef float Floats __attribute__((vector_size(64)));
typedef float HalfOfFloats __attribute__((vector_size(32)));
typedef float QuarterOfFloats __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Shorts __attribute__((vector_size(32)));

// Of a loop over what shall lie in registers: left to itself, the compiler keeps such arrays in memory.
#define UNROLLED _Pragma("GCC unroll 16")

constexpr int kLanes = 16;
// Numbers that are read at a time.
constexpr int kStep = 2 * kLanes;
// Rows that a weight is multiplied with once it is read; more come in turns, while the weights lie in a cache.
constexpr int kRows = 4;
// Inputs that are added to an output before it is stored, in matrices with inputs first.
constexpr int kDepth = 8;
// Bytes of a matrix that a thread takes at a time.
constexpr int64_t kPart = 128 << 10;
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
inline void Unpack(const Number* row, int64_t inputs, bool in_order, float* to) {
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

// Outputs `output`, `output + apart`, ... of some rows, of a matrix `[outputs, inputs]`.
template <int rows, int count, typename Weight>
inline void Dot(const float* const* x, const Weight* matrix, int64_t inputs, int64_t output, int64_t apart,
                float* const* out) {
  const Weight* weights[count];
  const float* from[rows];
  UNROLLED for (int o = 0; o < count; ++o) weights[o] = matrix + (output + o * apart) * inputs;
  UNROLLED for (int r = 0; r < rows; ++r) from[r] = x[r];
  Floats sums[count][rows] = {};
  auto add = [&](const Pair* pairs, int64_t i) {
    UNROLLED for (int r = 0; r < rows; ++r) {
      Floats first = Load<Floats>(from[r] + i), second = Load<Floats>(from[r] + i + kLanes);
      UNROLLED for (int o = 0; o < count; ++o) sums[o][r] += pairs[o].first * first;
      UNROLLED for (int o = 0; o < count; ++o) sums[o][r] += pairs[o].second * second;
    }
  };
  Pair pairs[count];
  int64_t i = 0;
  for (; i + kStep <= inputs; i += kStep) {
    UNROLLED for (int o = 0; o < count; ++o) {
      UNROLLED for (int line = 0; line < kStep; line += kLine / sizeof(Weight)) {
        __builtin_prefetch(reinterpret_cast<const char*>(weights[o] + i + line) + kAhead);
      }
      pairs[o] = LoadStep(weights[o] + i);
    }
    add(pairs, i);
  }
  if (i < inputs) {
    UNROLLED for (int o = 0; o < count; ++o) {
      Weight last[kStep] = {};
      std::memcpy(last, weights[o] + i, (inputs - i) * sizeof(Weight));
      pairs[o] = LoadStep(last);
    }
    add(pairs, i);
  }
  UNROLLED for (int o = 0; o < count; ++o) {
    UNROLLED for (int r = 0; r < rows; ++r) out[r][output + o * apart] = Sum(sums[o][r]);
  }
}

// Adds `depth` inputs from `input` on to outputs `begin` to `end` of some rows, or begins them, of a matrix
// `[inputs, stride]`. Whole steps of outputs are left as `LoadStep` has them.
template <int rows, typename Weight>
inline void AddInputs(const float* const* x, const Weight* matrix, int64_t input, int depth, int64_t stride,
                      int64_t begin, int64_t end, bool begins, float* const* out) {
  const Weight* weights = matrix + input * stride;
  const float* from[rows];
  float* to[rows];
  UNROLLED for (int r = 0; r < rows; ++r) {
    from[r] = x[r] + input;
    to[r] = out[r];
  }
  int64_t o = begin;
  for (; o + kStep <= end; o += kStep) {
    Floats first[rows] = {}, second[rows] = {};
    UNROLLED for (int r = 0; r < rows && !begins; ++r) {
      first[r] = Load<Floats>(to[r] + o);
      second[r] = Load<Floats>(to[r] + o + kLanes);
    }
    for (int j = 0; j < depth; ++j) {
      UNROLLED for (int line = 0; line < kStep; line += kLine / sizeof(Weight)) {
        __builtin_prefetch(weights + (kDepth + j) * stride + o + line);
      }
      Pair pair = LoadStep(weights + j * stride + o);
      UNROLLED for (int r = 0; r < rows; ++r) {
        first[r] += pair.first * from[r][j];
        second[r] += pair.second * from[r][j];
      }
    }
    UNROLLED for (int r = 0; r < rows; ++r) {
      Store(to[r] + o, first[r]);
      Store(to[r] + o + kLanes, second[r]);
    }
  }
  if (o == end) return;
  UNROLLED for (int r = 0; r < rows; ++r) {
    float last[kStep] = {};
    if (!begins) std::memcpy(last, to[r] + o, (end - o) * sizeof(float));
    Floats first = Load<Floats>(last), second = Load<Floats>(last + kLanes);
    for (int j = 0; j < depth; ++j) {
      Weight some[kStep] = {};
      std::memcpy(some, weights + j * stride + o, (end - o) * sizeof(Weight));
      first += LoadLanes(some) * from[r][j];
      second += LoadLanes(some + kLanes) * from[r][j];
    }
    Store(last, first);
    Store(last + kLanes, second);
    std::memcpy(to[r] + o, last, (end - o) * sizeof(float));
  }
}

// Rows that are multiplied by one matrix: packed, one after the other, each with room for a whole number of steps in
// float32; and where their outputs go.
struct Group {
  const void* matrix;
  std::vector<float*> packed, out;
};

// Calls `body` with a number of rows that is known when this is compiled, and the first of them.
template <typename Body>
inline void ByRows(const Group& group, const Body& body) {
  int64_t count = group.out.size();
  for (int64_t row = 0; row < count; row += kRows) {
    switch (std::min<int64_t>(kRows, count - row)) {
      case 1: body(std::integral_constant<int, 1>(), row); break;
      case 2: body(std::integral_constant<int, 2>(), row); break;
      case 3: body(std::integral_constant<int, 3>(), row); break;
      default: body(std::integral_constant<int, kRows>(), row);
    }
  }
}

// Products with a matrix `[outputs, inputs]`, by lanes in float32.
template <typename Number>
struct ByLanes {
  using Weight = Number;

  static void Pack(const std::vector<const Weight*>& rows, int64_t inputs, const Group& group) {
    for (size_t row = 0; row < rows.size(); ++row) Unpack(rows[row], inputs, false, group.packed[row]);
  }

  // Outputs `begin` to `end`.
  static void Multiply(const Group& group, int64_t inputs, int64_t begin, int64_t end) {
    const Weight* matrix = static_cast<const Weight*>(group.matrix);
    int64_t each = (end - begin) / kStreams, o = begin;
    for (; o < begin + each; ++o) {
      ByRows(group, [&](auto rows, int64_t row) {
        Dot<decltype(rows)::value, kStreams>(&group.packed[row], matrix, inputs, o, each, &group.out[row]);
      });
    }
    for (o = begin + each * kStreams; o < end; ++o) {
      ByRows(group, [&](auto rows, int64_t row) {
        Dot<decltype(rows)::value, 1>(&group.packed[row], matrix, inputs, o, 0, &group.out[row]);
      });
    }
  }
};

// Adds rows, unpacked in order, times a matrix `[inputs, stride]` to outputs `begin` to `end`, or begins them; as
// `AddInputs` leaves them.
template <typename Weight>
void MultiplyInputsFirst(const Group& group, int64_t inputs, int64_t stride, int64_t begin, int64_t end, bool begins) {
  const Weight* matrix = static_cast<const Weight*>(group.matrix);
  for (int64_t i = 0; i < inputs; i += kDepth) {
    ByRows(group, [&](auto rows, int64_t row) {
      auto add = [&](int depth) {
        AddInputs<decltype(rows)::value>(&group.packed[row], matrix, i, depth, stride, begin, end, begins && i == 0,
                                         &group.out[row]);
      };
      if (inputs - i >= kDepth) {
        add(kDepth);
      } else {
        add(static_cast<int>(inputs - i));
      }
    });
  }
}

// Puts `count` outputs in order that `MultiplyInputsFirst` has left.
template <typename Weight>
inline void PutInOrder(float* outputs, int64_t count) {
  if (sizeof(Weight) != sizeof(uint16_t)) return;
  for (int64_t i = 0; i + kStep <= count; i += kStep) {
    float step[kStep];
    std::memcpy(step, outputs + i, sizeof(step));
    for (int j = 0; j < kStep; ++j) outputs[i + j] = step[j % 2 * kLanes + j / 2];
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
#error "native code: neither x86-64 nor arm64"
#endif
  const uint64_t before_ = Get();
};

// What the threads of one call share. Those that come when nothing is left touch nothing but `next`.
template <typename Item>
struct Shared {
  explicit Shared(Item item, int64_t size) : item(std::move(item)), size(size) {}

  const Item item;
  const int64_t size;
  std::atomic<int64_t> next{0}, done{0};

  void Run() {
    FlushDenormals flush;
    int64_t i;
    while ((i = next.fetch_add(1, std::memory_order_relaxed)) < size) {
      item(i);
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

// Calls `item` with 0 to `size` - 1, once each, on as many threads as pay for reading so many bytes.
template <typename Item>
void InParallel(ffi::ThreadPool threads, int64_t size, int64_t bytes, Item item) {
  auto shared = std::make_shared<Shared<Item>>(std::move(item), size);
  // What one thread reads at once is done before another one has begun.
  int64_t helpers = std::min({threads.num_threads(), size, 1 + bytes / kPart}) - 1;
  for (int64_t i = 0; i < helpers; ++i) threads.Schedule([shared] { shared->Run(); });
  shared->Run();
  while (shared->done.load(std::memory_order_acquire) < size) std::this_thread::yield();
}

inline std::string Shape(ffi::AnyBuffer::Dimensions dimensions) {
  std::string text = "[";
  for (int64_t size : dimensions) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

// Bits of bfloat16, or bfloat16.
inline bool IsNarrow(ffi::DataType type) { return type == ffi::U16 || type == ffi::BF16; }

}  // namespace novalm

#endif  // NOVALM_ROWS_H_
