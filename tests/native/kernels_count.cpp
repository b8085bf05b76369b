// Runs one fixed piece of work, so that its instructions can be counted: by valgrind (function `measured`),
// or by this program itself, which then runs a copy of itself one instruction at a time. The latter is slow
// and knows every instruction set of the CPU; valgrind knows no AVX-512.
//
//     kernels_count                          the compiler, then the cases
//     kernels_count INSTRUCTION_SET CASE     runs it once beforehand, then once in `measured`
//     kernels_count INSTRUCTION_SET CASE step     prints the number of instructions
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <map>
#include <string>

#include "fixtures.h"

namespace {

using Work = std::function<void()>;

// x [rows, k] times the transpose of a matrix [n, k], with the rounding of x.
Work product(pt::Engine& e, pt::Source source, int rows, int n, int k) {
  struct Data {
    std::unique_ptr<pt::Weight> w;
    std::vector<float> x, out;
  };
  auto d = std::make_shared<Data>();
  d->w = fixture::packed(e, plain::Weights(source, n, k, 1));
  d->x = plain::Random(2).normals(size_t(rows) * k), d->out.resize(size_t(rows) * n);
  return [&e, d, rows, k] { e.linear({d->x.data(), rows, k}, d->w->matrix, nullptr, d->out.data()); };
}

// The last `rows` of `context` tokens, in the shape of a small model: 9 heads, 3 of KV, 64 wide.
Work attention(pt::Engine& e, int context, int rows) {
  struct Data {
    fixture::Sequences all, last;
    std::unique_ptr<pt::KVStore> kv;
    std::vector<float> q, k, v, out;
  };
  constexpr int dim = 64, heads = 9, kv_heads = 3;
  auto d =
      std::make_shared<Data>(Data{{{{context, context}}, 16}, {{{context, rows}}, 16}, {}, {}, {}, {}, {}});
  d->kv = fixture::storage(d->all.blocks, 16, kv_heads, dim, pt::KVType::F16);
  plain::Random dice(3);
  d->q = dice.normals(size_t(rows) * heads * dim), d->out.resize(d->q.size());
  d->k = dice.normals(size_t(context) * kv_heads * dim), d->v = dice.normals(d->k.size());
  e.kv_write(d->kv->view, 0, {d->k.data(), context, kv_heads * dim}, d->v.data(), d->all.slots.data());
  return
      [&e, d] { e.attention(d->q.data(), d->kv->view, 0, d->last.view(), {heads, 0.125f}, d->out.data()); };
}

Work sampling(pt::Engine& e, float top_p) {
  struct Data {
    std::vector<float> logits, parameters;
    int32_t top_k = 0, token = 0;
  };
  auto d = std::make_shared<Data>(Data{plain::Random(4).normals(4096), {1.0f, top_p, 0.0f, 0.5f}});
  return [&e, d] {
    const float* p = d->parameters.data();
    e.sample({d->logits.data(), 1, 4096}, {p, p + 1, p + 2, p + 3, &d->top_k}, &d->token);
  };
}

const std::map<std::string, std::function<Work(pt::Engine&)>> kCases = {
    {"row_q4", [](pt::Engine& e) { return product(e, pt::Source::Q4_1, 1, 192, 576); }},
    {"row_q8", [](pt::Engine& e) { return product(e, pt::Source::Q8_0, 1, 192, 576); }},
    {"row_f32", [](pt::Engine& e) { return product(e, pt::Source::F32, 1, 96, 576); }},
    {"rows64_q4", [](pt::Engine& e) { return product(e, pt::Source::Q4_1, 64, 32, 288); }},
    {"rows64_q8", [](pt::Engine& e) { return product(e, pt::Source::Q8_0, 64, 32, 288); }},
    {"rows64_f32", [](pt::Engine& e) { return product(e, pt::Source::F32, 64, 32, 288); }},
    {"attention_decode", [](pt::Engine& e) { return attention(e, 200, 1); }},
    {"attention_prefill", [](pt::Engine& e) { return attention(e, 48, 48); }},
    {"sample_top_p", [](pt::Engine& e) { return sampling(e, 0.9f); }},
};

}  // namespace

extern "C" __attribute__((noinline, visibility("default"))) void measured(const Work& work) {
  work();
  asm volatile("");  // not a tail call: the function ends behind its work
}

namespace {

// Instructions of `work` in a child, which stops before and behind it. -1: tracing is not allowed here.
long steps(const Work& work) {
  const pid_t child = fork();
  if (child == 0) {
    ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
    raise(SIGSTOP);
    measured(work);
    raise(SIGSTOP);
    _exit(0);
  }
  int status = 0;
  long count = -1;
  waitpid(child, &status, 0);
  do {
    if (!WIFSTOPPED(status) || ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr)) break;
    waitpid(child, &status, 0), count++;
  } while (WIFSTOPPED(status) && WSTOPSIG(status) == SIGTRAP);
  const bool complete = WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP;
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
  return complete ? count : -1;
}

}  // namespace

int main(int count, char** words) {
  if (count < 3) {
    std::printf("%s\n", __VERSION__);
    for (const auto& [name, make] : kCases) std::printf("%s\n", name.c_str());
    return 0;
  }
  pt::Engine engine(1, words[1]);
  const Work work = kCases.at(words[2])(engine);
  work();
  if (count == 3) return measured(work), 0;
  const long n = steps(work);
  std::printf("%ld\n", n);
  return n < 0;
}
