// Products of bfloat16 rows with a matrix with outputs first, by the tiles of a processor that has them (AMX): up to 16
// rows take no longer than one.
//
// An output is added up in one order here too: a tile of inputs after the other, those of even and those of odd places.

#ifndef NOVALM_TILES_H_
#define NOVALM_TILES_H_

#include "rows.h"

#if defined(__AMX_BF16__) && defined(__linux__) && !defined(NOVALM_WITHOUT_TILES)
#define NOVALM_TILES 1
#endif

#if NOVALM_TILES

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace novalm {

// Whether the system lets this process use tiles, which it has to ask for.
inline bool TilesPermitted() {
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA of Linux
  static const bool permitted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return permitted;
}

struct ByTiles {
  using Weight = uint16_t;

  // Rows of a tile, and columns of one with sums.
  static constexpr int64_t kSide = 16;
  // Steps of inputs that are fetched ahead of those that are computed with.
  static constexpr int64_t kStepsAhead = 8;

  // Blocks of up to `kSide` rows: two inputs of each row, then the next two.
  static void Pack(const std::vector<const Weight*>& rows, int64_t inputs, const Group& group) {
    for (size_t first = 0; first < rows.size(); first += kSide) {
      size_t count = std::min<size_t>(kSide, rows.size() - first);
      char* to = reinterpret_cast<char*>(group.packed[first]);
      std::memset(to, 0, Padded(inputs) * count * sizeof(Weight));
      for (size_t row = 0; row < count; ++row) {
        const Weight* from = rows[first + row];
        char* pair = to + row * 2 * sizeof(Weight);
        for (int64_t i = 0; i + 1 < inputs; i += 2, pair += count * 2 * sizeof(Weight)) {
          std::memcpy(pair, from + i, 2 * sizeof(Weight));
        }
        if (inputs % 2) std::memcpy(pair, from + inputs - 1, sizeof(Weight));
      }
    }
  }

  // Outputs `begin` to `end`.
  static void Multiply(const Group& group, int64_t inputs, int64_t begin, int64_t end) {
    const Weight* matrix = static_cast<const Weight*>(group.matrix);
    int64_t count = group.out.size();
    for (int64_t first = 0; first < count; first += kSide) {
      int64_t rows = std::min(kSide, count - first);
      Configure(rows);
      const char* x = reinterpret_cast<const char*>(group.packed[first]);
      for (int64_t o = begin; o < end; o += kSide) {
        int64_t outputs = std::min(kSide, end - o);
        float sums[kSide * kSide];
        MultiplySide(x, rows, matrix + o * inputs, inputs, outputs, sums);
        for (int64_t row = 0; row < rows; ++row) {
          for (int64_t i = 0; i < outputs; ++i) group.out[first + row][o + i] = sums[i * rows + row];
        }
      }
    }
    _tile_release();
  }

 private:
  // Tile 0 has sums, 1 weights and 2 inputs; instructions take nothing but such numbers.
  static void Configure(int64_t columns) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (int tile = 0; tile < 3; ++tile) {
      shapes.bytes[tile] = tile == 1 ? kStep * sizeof(Weight) : columns * sizeof(float);
      shapes.rows[tile] = kSide;
    }
    KeepOrder(&shapes);
    _tile_loadconfig(&shapes);
    KeepOrder(&shapes);
  }

  // The compiler does not know that instructions of tiles read memory: what is written before stays before, and what
  // is written afterwards stays behind.
  static void KeepOrder(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

  // Packed rows times `outputs` rows of weights, up to `kSide`: sums `[kSide, rows]`.
  static void MultiplySide(const char* x, int64_t rows, const Weight* weights, int64_t inputs, int64_t outputs,
                           float* sums) {
    _tile_zero(0);
    int64_t pairs = rows * 2 * sizeof(Weight);
    for (int64_t i = 0; i < inputs; i += kStep) {
      _tile_loadd(2, x + i / 2 * pairs, pairs);
      if (i + kStep <= inputs && outputs == kSide) {
        // What comes next in memory are the next outputs.
        int64_t ahead = i + kStepsAhead * kStep;
        if (ahead >= inputs) ahead += (kSide - 1) * inputs;
        for (int o = 0; o < kSide; ++o) __builtin_prefetch(weights + o * inputs + ahead);
        _tile_loadd(1, weights + i, inputs * sizeof(Weight));
      } else {
        // A step that the matrix does not fill.
        alignas(64) Weight step[kSide * kStep] = {};
        for (int64_t o = 0; o < outputs; ++o) {
          std::memcpy(step + o * kStep, weights + o * inputs + i, std::min<int64_t>(kStep, inputs - i) * sizeof(Weight));
        }
        KeepOrder(step);
        _tile_loadd(1, step, kStep * sizeof(Weight));
        KeepOrder(step);
      }
      _tile_dpbf16ps(0, 1, 2);
    }
    _tile_stored(0, sums, rows * sizeof(float));
  }
};

}  // namespace novalm

#endif  // NOVALM_TILES

namespace novalm {

// Calls `body` with what multiplies numbers on this machine, narrow ones or float32.
template <typename Body>
ffi::Error ByKind(bool narrow, const Body& body) {
  if (!narrow) return body(ByLanes<float>());
#if NOVALM_TILES
  if (TilesPermitted()) return body(ByTiles());
#endif
  return body(ByLanes<uint16_t>());
}

}  // namespace novalm

#endif  // NOVALM_TILES_H_
