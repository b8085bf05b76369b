// What a wheel asks of the C library, as it was before glibc 2.32: the module is compiled on a newer system
// and has to load on an older one (docs/adr/0062). Only with PAGETURNER_OLD_GLIBC. These names stay inside
// the module, where libstdc++, which is then linked into it, finds them before those of the system.
#include <pthread.h>
#include <sched.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

// Before 2.34 they were in libpthread, which every Python of such a system has loaded; their first version is
// exported to this day.
#if defined(__x86_64__)
#define PT_FIRST "GLIBC_2.2.5"
#define PT_FIRST_AFFINITY "GLIBC_2.3.4"
#elif defined(__aarch64__)
#define PT_FIRST "GLIBC_2.17"
#define PT_FIRST_AFFINITY "GLIBC_2.17"
#else
#error "which version of glibc was the first of this architecture?"
#endif

extern "C" {
int pt_old_create(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
int pt_old_join(pthread_t, void**);
int pt_old_detach(pthread_t);
int pt_old_setaffinity(pthread_t, size_t, const cpu_set_t*);
asm(".symver pt_old_create, pthread_create@" PT_FIRST);
asm(".symver pt_old_join, pthread_join@" PT_FIRST);
asm(".symver pt_old_detach, pthread_detach@" PT_FIRST);
asm(".symver pt_old_setaffinity, pthread_setaffinity_np@" PT_FIRST_AFFINITY);

#define PT_INSIDE __attribute__((visibility("hidden")))
PT_INSIDE int pthread_create(pthread_t* thread, const pthread_attr_t* how, void* (*run)(void*), void* with) {
  return pt_old_create(thread, how, run, with);
}
PT_INSIDE int pthread_join(pthread_t thread, void** result) { return pt_old_join(thread, result); }
PT_INSIDE int pthread_detach(pthread_t thread) { return pt_old_detach(thread); }
PT_INSIDE int pthread_setaffinity_np(pthread_t thread, size_t size, const cpu_set_t* cores) {
  return pt_old_setaffinity(thread, size, cores);
}

// 2.33 was the first to export it. On 64 bits the kernel's structure is the library's.
PT_INSIDE int fstat(int file, struct stat* out) { return int(syscall(SYS_fstat, file, out)); }
PT_INSIDE int fstat64(int file, struct stat64* out) { return int(syscall(SYS_fstat, file, out)); }

// 2.32: libstdc++ counts references without atomics where it is true. Never, then.
PT_INSIDE char __libc_single_threaded = 0;
}
