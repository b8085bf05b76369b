// Adapters as Python has them. Whoever passes one to a step holds it for so long.
#pragma once
#include <nanobind/nanobind.h>

#include <memory>
#include <vector>

#include "adapters.h"
#include "ops.h"

// An adapter, and the only decoder that it fits.
struct BoundAdapter {
  pt::Adapter adapter;
  const pt::StackView* stack;
};

void bind_adapters(nanobind::module_& m);

// From (layer, input, (pair or None, ...)) where a pair is (A, B, scale); layer -1 is the head, layer -2 the
// embedding. Throws std::invalid_argument where shapes do not fit the decoder.
std::unique_ptr<BoundAdapter> make_adapter(const pt::StackView& stack, int kind, nanobind::list parts);

// The views of a list of adapters or None, `count` of them; empty for None in place of the list. Throws
// std::invalid_argument for one of another decoder, or whose head is not of `vocabulary` tokens.
std::vector<const pt::AdapterView*> adapters_of(nanobind::handle list, size_t count,
                                                const pt::StackView* stack, int vocabulary);
