// Preloaded by malloc_count.py: counts the calls of the functions that allocate memory, of all threads.
//
// Works with glibc, whose own functions are still to be had by other names.
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>

extern void* __libc_malloc(size_t size);
extern void* __libc_calloc(size_t count, size_t size);
extern void* __libc_realloc(void* memory, size_t size);
extern void* __libc_memalign(size_t alignment, size_t size);

atomic_ullong num_mallocs, num_callocs, num_reallocs, num_aligned;

static void count(atomic_ullong* counter) { atomic_fetch_add_explicit(counter, 1, memory_order_relaxed); }

void* malloc(size_t size) {
  count(&num_mallocs);
  return __libc_malloc(size);
}

void* calloc(size_t num, size_t size) {
  count(&num_callocs);
  return __libc_calloc(num, size);
}

void* realloc(void* memory, size_t size) {
  count(&num_reallocs);
  return __libc_realloc(memory, size);
}

void* memalign(size_t alignment, size_t size) {
  count(&num_aligned);
  return __libc_memalign(alignment, size);
}

void* aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void** out, size_t alignment, size_t size) {
  void* memory = memalign(alignment, size);
  if (memory == NULL) return ENOMEM;
  *out = memory;
  return 0;
}
