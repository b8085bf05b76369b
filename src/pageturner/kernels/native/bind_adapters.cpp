#include "bind_adapters.h"

#include <nanobind/ndarray.h>

#include <array>
#include <cmath>
#include <stdexcept>

namespace nb = nanobind;

namespace {

constexpr int kMostRank = 256, kHead = -1, kEmbed = -2;
using Values = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void check(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

struct Part {
  int layer, input;
  std::array<pt::LoraPair, pt::kLoraOutputs> pairs;
  std::array<const pt::LoraPair*, pt::kLoraOutputs> given{};
};

pt::Factor factor(nb::handle h, pt::Kind kind) {
  const auto v = nb::cast<Values>(h, false);
  check(v.itemsize() == pt::bytes_of(kind), "adapter: a matrix of another type");
  check(v.shape(0) > 0 && v.shape(1) > 0 && v.shape(0) < (1u << 30) && v.shape(1) < (1u << 30),
        "adapter: an empty matrix");
  return {(const uint8_t*)v.data(), int(v.shape(0)), int(v.shape(1))};
}

pt::LoraPair pair_of(nb::handle h, pt::Kind kind) {
  const auto t = nb::cast<nb::tuple>(h);
  check(t.size() == 3, "adapter: a pair is A, B and scale");
  pt::LoraPair p{factor(t[0], kind), factor(t[1], kind), nb::cast<float>(t[2])};
  check(std::isfinite(p.scale), "adapter: the scale is no number");
  return p;
}

// The matrices that the outputs of an input stand beside.
std::array<const pt::Matrix*, pt::kLoraOutputs> beside(const pt::LayerView& l, int input) {
  switch (pt::LoraInput(input)) {
    case pt::LoraInput::Qkv: return {l.q, l.k, l.v};
    case pt::LoraInput::O: return {l.o, nullptr, nullptr};
    case pt::LoraInput::Mlp: return {l.up, l.gate, nullptr};
    default: return {l.down, nullptr, nullptr};
  }
}

void check_part(const Part& part, const pt::StackView& stack) {
  const int width = stack.embed->k, layers = int(stack.layers.size());
  check(part.layer >= kEmbed && part.layer < layers, "adapter: no such layer");
  check(part.input >= 0 && part.input < pt::kLoraInputs, "adapter: no such input");
  for (int i = 0; i < pt::kLoraOutputs; i++) {
    const pt::LoraPair* p = part.given[size_t(i)];
    if (!p) continue;
    if (part.layer == kEmbed) {
      check(i == 0 && p->a.n == stack.vocabulary && p->b.n == width && p->a.k == p->b.k,
            "adapter: the embedding has another shape");
      check(p->b.k <= kMostRank, "adapter: the rank is too large");
      continue;
    }
    check(p->a.n == p->b.k && p->a.n <= kMostRank, "adapter: A and B do not fit each other");
    if (part.layer == kHead) {
      check(i == 0 && p->a.k == width, "adapter: the head has another width");
      continue;
    }
    const pt::LayerView& l = *stack.layers[size_t(part.layer)];
    const pt::Matrix* m = beside(l, part.input)[size_t(i)];
    check(m && p->a.k == m->k && p->b.n == m->n, "adapter: a matrix does not fit the layer");
  }
}

Part part_of(nb::handle h, pt::Kind kind) {
  const auto t = nb::cast<nb::tuple>(h);
  check(t.size() == 3, "adapter: a part is layer, input and pairs");
  Part part{nb::cast<int>(t[0]), nb::cast<int>(t[1]), {}, {}};
  const auto pairs = nb::cast<nb::tuple>(t[2]);
  check(pairs.size() <= pt::kLoraOutputs && pairs.size() > 0, "adapter: up to three pairs share an input");
  for (size_t i = 0; i < pairs.size(); i++)
    if (!pairs[i].is_none()) part.pairs[i] = pair_of(pairs[i], kind);
  return part;
}

}  // namespace

std::unique_ptr<BoundAdapter> make_adapter(const pt::StackView& stack, int type, nb::list parts) {
  check(type >= 0 && type <= int(pt::Kind::BF16), "adapter: F32, F16 or BF16");
  const auto kind = pt::Kind(type);
  std::vector<Part> list;
  for (nb::handle h : parts) list.push_back(part_of(h, kind));
  size_t bytes = 64;
  for (size_t i = 0; i < list.size(); i++) {
    Part& part = list[i];
    const auto pairs = nb::cast<nb::tuple>(nb::cast<nb::tuple>(parts[i])[2]);
    bool some = false;
    for (size_t j = 0; j < pairs.size(); j++)
      if (!pairs[j].is_none()) part.given[j] = &part.pairs[j], some = true;
    check(some, "adapter: a part without pairs");
    check_part(part, stack);
    bytes += part.layer == kEmbed ? pt::Adapter::embed_room(kind, *part.given[0])
                                  : pt::Adapter::room(kind, part.given.data());
  }
  auto made =
      std::make_unique<BoundAdapter>(BoundAdapter{pt::Adapter(kind, int(stack.layers.size())), &stack});
  nb::gil_scoped_release release;
  made->adapter.reserve(bytes);
  for (const Part& part : list)
    if (part.layer == kEmbed)
      made->adapter.add_embed(*part.given[0]);
    else
      made->adapter.add(part.layer, pt::LoraInput(part.input), part.given.data());
  return made;
}

std::vector<const pt::AdapterView*> adapters_of(nb::handle list, size_t count, const pt::StackView* stack,
                                                int vocabulary) {
  std::vector<const pt::AdapterView*> found;
  if (list.is_none()) return found;
  for (nb::handle h : nb::cast<nb::list>(list)) {
    const BoundAdapter* a = h.is_none() ? nullptr : &nb::cast<const BoundAdapter&>(h);
    check(!a || !stack || a->stack == stack, "adapters: one of another model");
    if (a && vocabulary) {
      const pt::LoraProduct& head = a->adapter.view().head;
      check(!head.a || head.out[0].n == vocabulary, "adapters: a head of another size");
    }
    found.push_back(a ? &a->adapter.view() : nullptr);
  }
  check(found.size() == count, "adapters: one, or None, for each");
  return found;
}

void bind_adapters(nb::module_& m) {
  nb::class_<BoundAdapter>(m, "Adapter").def_prop_ro("nbytes", [](const BoundAdapter& a) {
    return a.adapter.nbytes();
  });
}
