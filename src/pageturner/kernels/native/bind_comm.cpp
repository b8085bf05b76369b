#include "bind_comm.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "comm.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Rows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

void gather(pt::Ranks& ranks, ConstRows mine, const std::vector<int>& starts, std::optional<Rows> out) {
  check(int(starts.size()) == ranks.size() + 1 && starts[0] == 0, "gather: a start for each rank");
  for (int r = 0; r < ranks.size(); r++) check(starts[r] <= starts[r + 1], "gather: starts must ascend");
  const int width = starts[size_t(ranks.rank()) + 1] - starts[size_t(ranks.rank())];
  check(int(mine.shape(1)) == width, "gather: of another width");
  check(out.has_value() == (ranks.rank() == 0), "gather: rank 0 has the whole, and no other");
  check(!out || (out->shape(0) == mine.shape(0) && int(out->shape(1)) == starts.back()),
        "gather: out has another shape");
  nb::gil_scoped_release release;
  ranks.gather(mine.data(), int(mine.shape(0)), starts.data(), out ? out->data() : nullptr);
}

}  // namespace

void bind_ranks(nb::module_& m) {
  nb::class_<pt::Ranks>(m, "Ranks")
      .def(
          "__init__",
          [](pt::Ranks* self, int fd, int rank, int size, size_t place) {
            check(size > 0 && rank >= 0 && rank < size && place >= 4096 && place % 128 == 0,
                  "ranks: no such rank");
            new (self) pt::Ranks(fd, rank, size, place);
          },
          "fd"_a, "rank"_a, "size"_a, "place"_a)
      .def_static("bytes", &pt::Ranks::bytes, "size"_a, "place"_a)
      .def_prop_ro("rank", &pt::Ranks::rank)
      .def_prop_ro("size", &pt::Ranks::size)
      .def_prop_ro("call", &pt::Ranks::call)
      .def("watch", &pt::Ranks::watch, "ended"_a, "patience"_a)
      .def(
          "sum",
          [](pt::Ranks& ranks, Rows x) {
            nb::gil_scoped_release release;
            ranks.sum(x.data(), x.size());
          },
          nb::arg().noconvert())
      .def(
          "pass_rows",
          [](pt::Ranks& ranks, int from, int to, Rows x) {
            check(from >= 0 && from < ranks.size() && to >= 0 && to < ranks.size() && from != to,
                  "pass_rows: no such ranks");
            nb::gil_scoped_release release;
            ranks.pass(from, to, x.data(), x.size());
          },
          nb::arg(), nb::arg(), nb::arg().noconvert())
      .def("send",
           [](pt::Ranks& ranks, Bytes data) {
             check(ranks.rank() == 0, "send: only rank 0 does");
             nb::gil_scoped_release release;
             ranks.send(data.data(), data.size());
           })
      .def("receive",
           [](pt::Ranks& ranks) {
             check(ranks.rank() > 0, "receive: rank 0 sends");
             std::vector<uint8_t> data;
             {
               nb::gil_scoped_release release;
               data = ranks.receive();
             }
             return nb::bytes(data.data(), data.size());
           })
      .def("gather", &gather, "mine"_a, "starts"_a, "out"_a.none());
}
