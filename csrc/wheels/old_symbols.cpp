// Symbols of glibc and libstdc++ in the versions that manylinux_2_28 has. A wheel is linked with this file, where the
// headers of a newer system ask for newer versions: the linker sends the calls of exp here (--wrap=exp), and so on.
// build_extension.py lists the symbols.

#if defined(__x86_64__)
#define FK_OLDEST_GLIBC "GLIBC_2.2.5"
#else  // 64-bit ARM
#define FK_OLDEST_GLIBC "GLIBC_2.17"
#endif

extern "C" {

// libstdc++'s shared_ptr counts without atomic instructions while this is not 0. glibc has it from 2.32 on.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

// From glibc 2.29 on they do not set errno, which nothing here reads.
__asm__(".symver old_exp, exp@" FK_OLDEST_GLIBC);
__asm__(".symver old_log, log@" FK_OLDEST_GLIBC);
__asm__(".symver old_pow, pow@" FK_OLDEST_GLIBC);
double old_exp(double);
double old_log(double);
double old_pow(double, double);
double __wrap_exp(double x) { return old_exp(x); }
double __wrap_log(double x) { return old_log(x); }
double __wrap_pow(double x, double y) { return old_pow(x, y); }

// std::condition_variable::wait; from GCC 12 on a thread may be cancelled in it.
__asm__(".symver old_wait, _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
void old_wait(void* variable, void* lock);
void __wrap__ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE(void* variable, void* lock) {
  old_wait(variable, lock);
}
}
