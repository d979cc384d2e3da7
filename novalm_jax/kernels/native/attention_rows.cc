// Attention of one new token of each sequence to the pages of its keys and values, as an XLA custom call on the CPU.
//
// Pages are read where they lie, in the order of their positions, and an online softmax (arXiv:1805.02867) is carried
// through them in float32. What comes out of a row depends neither on other rows nor on which pages it has.

#include <limits>

#include "tiles.h"

namespace novalm {
namespace {

// Heads that a thread takes at a time of those that share keys.
constexpr int64_t kHeads = 16;
// Score of nothing: finite, so that a difference of two is no NaN.
constexpr float kNever = -1e30f;

// e^x for x <= 0; zero where that would be no normal number. With the polynomial of Cephes (S. L. Moshier), expf.
inline Floats Exp(Floats x) {
  const float kShift = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to a whole number
  Floats twos = x * 1.44269504088896341f + kShift;
  Words exponent = (Words)twos;
  twos -= kShift;
  Floats rest = x - twos * 0.693359375f;
  rest -= twos * -2.12194440e-4f;
  Floats sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  Floats power = (Floats)((exponent + 127u) << 23);
  return x < -87.3f ? Floats{} : sum * power;
}

// A softmax that has seen some keys: the highest score, and the sum of all weights relative to it.
struct Softmax {
  float top = kNever, total = 0;

  // Turns `count` scores of further keys into weights; gives what earlier weights are multiplied by. `scores` has room
  // for whole lanes.
  float Add(float* scores, int64_t count, float scale) {
    int64_t whole = (count + kLanes - 1) / kLanes * kLanes;
    for (int64_t i = 0; i < count; ++i) scores[i] *= scale;
    std::fill(scores + count, scores + whole, -std::numeric_limits<float>::infinity());
    Floats tops = Floats{} + top;
    for (int64_t i = 0; i < whole; i += kLanes) {
      Floats some = Load<Floats>(scores + i);
      tops = some > tops ? some : tops;
    }
    float before = top;
    for (int lane = 0; lane < kLanes; ++lane) top = std::max(top, tops[lane]);
    Floats sums = {};
    for (int64_t i = 0; i < whole; i += kLanes) {
      Floats weights = Exp(Load<Floats>(scores + i) - top);
      Store(scores + i, weights);
      sums += weights;
    }
    float fade = Exp(Floats{} + (before - top))[0];
    total = total * fade + Sum(sums);
    return fade;
  }
};

template <typename Kind>
struct Attention {
  using Number = typename Kind::Weight;

  const Number *queries, *keys, *values;
  const int32_t *tables, *starts, *ends;
  const float* sinks;  // None where it is null.
  float* out;
  int64_t heads, groups, page, blocks, key_dim, value_stride, value_dim, window, chunk;
  float scale;

  int64_t each() const { return heads / groups; }
  int64_t parts() const { return (each() + kHeads - 1) / kHeads; }
  bool sees(int64_t row) const { return starts[row] >= 0 && ends[row] > starts[row]; }

  // The first position that a row sees.
  int64_t first(int64_t row) const {
    int64_t start = starts[row], first = 0;
    if (window) first = std::max(first, start - window + 1);
    if (chunk) first = std::max(first, start / chunk * chunk);
    return first;
  }

  // Some heads of one row that share keys.
  void operator()(int64_t item) const {
    int64_t part = item % parts(), group = item / parts() % groups, row = item / parts() / groups;
    int64_t head = row * heads + group * each() + part * kHeads, count = std::min(kHeads, each() - part * kHeads);
    float* result = out + head * value_dim;
    std::fill(result, result + count * value_dim, 0.0f);
    if (!sees(row)) return;

    int64_t padded = Padded(key_dim), room = Padded(page);
    std::vector<float> packed(count * padded), scores(count * room);
    std::vector<Softmax> softmax(count);
    std::vector<const Number*> rows;
    Group asking{nullptr, {}, {}}, mixing{nullptr, {}, {}};
    for (int64_t h = 0; h < count; ++h) {
      rows.push_back(queries + (head + h) * key_dim);
      asking.packed.push_back(&packed[h * padded]);
      asking.out.push_back(&scores[h * room]);
      mixing.packed.push_back(&scores[h * room]);
      mixing.out.push_back(result + h * value_dim);
      // As a key whose value is nothing.
      if (sinks) softmax[h] = {sinks[head - row * heads + h], 1.0f};
    }
    Kind::Pack(rows, key_dim, asking);
    for (int64_t position = first(row), next; position <= starts[row]; position = next) {
      int64_t block = position / page;
      next = std::min<int64_t>((block + 1) * page, starts[row] + 1);
      int64_t at = (tables[row * blocks + block] * groups + group) * page + position % page;
      asking.matrix = keys + at * key_dim;
      Kind::Multiply(asking, key_dim, 0, next - position);
      for (int64_t h = 0; h < count; ++h) {
        float fade = softmax[h].Add(&scores[h * room], next - position, scale);
        for (int64_t i = 0; i < value_dim; ++i) mixing.out[h][i] *= fade;
      }
      mixing.matrix = values + at * value_stride;
      MultiplyInputsFirst<Number>(mixing, next - position, value_stride, 0, value_dim, false);
    }
    for (int64_t h = 0; h < count; ++h) {
      PutInOrder<Number>(mixing.out[h], value_dim);
      // Nothing weighs anything where all scores are minus infinity.
      float total = softmax[h].total == 0 ? 1 : softmax[h].total;
      for (int64_t i = 0; i < value_dim; ++i) mixing.out[h][i] /= total;
    }
  }
};

// q [b, h, c], keys [p, g, page, c] and values [p, g, page, >= value_dim], all bfloat16 (or its bits) or all float32;
// int32 tables [b, n], starts [b] and ends [b]; float32 sinks [h], or [0] for none. A window or chunk of 0 is none.
// Gives float32 [b, h, value_dim]: zeros for a row that starts below 0, or ends where it starts.
ffi::Error AttentionRows(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                         ffi::AnyBuffer tables, ffi::AnyBuffer starts, ffi::AnyBuffer ends, ffi::AnyBuffer sinks,
                         float scale, int64_t window, int64_t chunk, ffi::Result<ffi::AnyBuffer> out) {
  auto rows = q.dimensions(), k = keys.dimensions(), v = values.dimensions(), table = tables.dimensions(),
       mixed = out->dimensions();
  if (rows.size() != 3 || k.size() != 4 || v.size() != 4 || table.size() != 2 || mixed.size() != 3 ||
      k[0] != v[0] || k[1] != v[1] || k[2] != v[2] || k[1] == 0 || k[2] == 0 || rows[1] % k[1] || rows[2] != k[3] ||
      table[0] != rows[0] || mixed[0] != rows[0] || mixed[1] != rows[1] || mixed[2] > v[3] ||
      static_cast<int64_t>(starts.element_count()) != rows[0] || ends.element_count() != starts.element_count() ||
      (sinks.element_count() && static_cast<int64_t>(sinks.element_count()) != rows[1]) || window < 0 || chunk < 0) {
    std::string shapes = "q " + Shape(rows) + ", keys " + Shape(k) + ", values " + Shape(v) + ", tables " +
                         Shape(table) + ", starts " + Shape(starts.dimensions()) + ", ends " +
                         Shape(ends.dimensions()) + ", sinks " + Shape(sinks.dimensions());
    return ffi::Error::InvalidArgument("attention rows: shapes do not match: " + shapes);
  }
  bool narrow = IsNarrow(q.element_type());
  for (ffi::DataType type : {q.element_type(), keys.element_type(), values.element_type()}) {
    if (narrow ? !IsNarrow(type) : type != ffi::F32) {
      return ffi::Error::InvalidArgument("attention rows: q, keys and values are all bfloat16 or all float32");
    }
  }
  if (tables.element_type() != ffi::S32 || starts.element_type() != ffi::S32 || ends.element_type() != ffi::S32 ||
      sinks.element_type() != ffi::F32 || out->element_type() != ffi::F32) {
    return ffi::Error::InvalidArgument("attention rows: tables, starts and ends are int32, sinks are float32");
  }
  return ByKind(narrow, [&](auto kind) {
    using Kind = decltype(kind);
    auto data = [](ffi::AnyBuffer& buffer) { return static_cast<const typename Kind::Weight*>(buffer.untyped_data()); };
    Attention<Kind> attention{data(q), data(keys), data(values), tables.typed_data<int32_t>(),
                              starts.typed_data<int32_t>(), ends.typed_data<int32_t>(),
                              sinks.element_count() ? sinks.typed_data<float>() : nullptr, out->typed_data<float>(),
                              rows[1], k[1], k[2], table[1], k[3], v[3], mixed[2], window, chunk, scale};
    int64_t seen = 0;
    for (int64_t row = 0; row < rows[0]; ++row) {
      if (!attention.sees(row)) continue;
      int64_t first = attention.first(row), last = attention.starts[row];
      seen += last + 1 - first;
      for (int64_t block = first / k[2]; block <= last / k[2]; ++block) {
        int64_t page = block < table[1] ? attention.tables[row * table[1] + block] : -1;
        if (page < 0 || page >= k[0]) {
          return ffi::Error::InvalidArgument("attention rows: row " + std::to_string(row) + " at position " +
                                             std::to_string(last) + " has page " + std::to_string(page) + " of " +
                                             std::to_string(k[0]) + " for block " + std::to_string(block) + " of " +
                                             std::to_string(table[1]));
        }
      }
    }
    int64_t bytes = seen * k[1] * (k[3] + mixed[2]) * static_cast<int64_t>(sizeof(typename Kind::Weight));
    InParallel(threads, rows[0] * k[1] * attention.parts(), bytes, attention);
    return ffi::Error::Success();
  });
}

}  // namespace
}  // namespace novalm

XLA_FFI_DEFINE_HANDLER_SYMBOL(novalm_attention_rows, novalm::AttentionRows,
                              novalm::ffi::Ffi::Bind()
                                  .Ctx<novalm::ffi::ThreadPool>()
                                  .Arg<novalm::ffi::AnyBuffer>()
                                  .Arg<novalm::ffi::AnyBuffer>()
                                  .Arg<novalm::ffi::AnyBuffer>()
                                  .Arg<novalm::ffi::AnyBuffer>()
                                  .Arg<novalm::ffi::AnyBuffer>()
                                  .Arg<novalm::ffi::AnyBuffer>()
                                  .Arg<novalm::ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("chunk")
                                  .Ret<novalm::ffi::AnyBuffer>());
