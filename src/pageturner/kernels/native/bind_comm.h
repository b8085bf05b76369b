// Ranks as Python has them.
#pragma once
#include <nanobind/nanobind.h>

void bind_ranks(nanobind::module_& m);
