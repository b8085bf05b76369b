// Recurrent layers as Python has them.
#pragma once
#include <nanobind/nanobind.h>

void bind_recurrent(nanobind::module_& m);
