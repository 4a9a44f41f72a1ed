/* A preloaded library that counts the memory that the process requests from the C library or the kernel.
 *
 * Blocks are counted if they are allocated while the region is open (hook_begin, hook_end), until they are freed at any
 * time. There are four kinds, by the call that requested them: plain heap blocks and mappings of at least SMALLEST
 * bytes, and aligned blocks of any size with an alignment below PAGE_ALIGNMENT, or from PAGE_ALIGNMENT on. glibc's own
 * functions are called beneath, so that no symbol has to be looked up while the process starts.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { HEAP, ALIGNED, PAGE_ALIGNED, MAPPED, KINDS };
enum { SMALLEST = 1024, PAGE_ALIGNMENT = 512, CAPACITY = 1 << 20 };

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

struct block {
  uintptr_t address; /* 0: empty */
  size_t bytes;
  int kind;
};

static struct block blocks[CAPACITY];
static long count;
static long live[KINDS], peak[KINDS], aligned_peak, largest_aligned;
static atomic_int region;
static atomic_flag busy = ATOMIC_FLAG_INIT;

static void lock(void) {
  while (atomic_flag_test_and_set_explicit(&busy, memory_order_acquire)) {
  }
}
static void unlock(void) { atomic_flag_clear_explicit(&busy, memory_order_release); }

static size_t home(uintptr_t address) { return (size_t)((address >> 4) * 11400714819323198485ull >> 44) % CAPACITY; }

static void add(void *pointer, size_t bytes, int kind) {
  const int counts = kind == ALIGNED || kind == PAGE_ALIGNED || bytes >= SMALLEST;
  if (pointer == NULL || !counts || !atomic_load(&region)) {
    return;
  }
  lock();
  if (++count > CAPACITY / 2) {
    __builtin_trap();
  }
  size_t slot = home((uintptr_t)pointer);
  while (blocks[slot].address != 0) {
    slot = (slot + 1) % CAPACITY;
  }
  blocks[slot] = (struct block){(uintptr_t)pointer, bytes, kind};
  live[kind] += (long)bytes;
  if (live[kind] > peak[kind]) {
    peak[kind] = live[kind];
  }
  if (live[ALIGNED] + live[PAGE_ALIGNED] > aligned_peak) {
    aligned_peak = live[ALIGNED] + live[PAGE_ALIGNED];
  }
  if (kind == ALIGNED && (long)bytes > largest_aligned) {
    largest_aligned = (long)bytes;
  }
  unlock();
}

/* Removes the block, and moves later ones into the hole, so that no search ends too early. */
static void drop(void *pointer) {
  if (pointer == NULL) {
    return;
  }
  lock();
  size_t slot = home((uintptr_t)pointer);
  while (blocks[slot].address != 0 && blocks[slot].address != (uintptr_t)pointer) {
    slot = (slot + 1) % CAPACITY;
  }
  if (blocks[slot].address != 0) {
    live[blocks[slot].kind] -= (long)blocks[slot].bytes;
    --count;
    size_t hole = slot;
    for (size_t next = (hole + 1) % CAPACITY; blocks[next].address != 0; next = (next + 1) % CAPACITY) {
      const size_t from_home = (next - home(blocks[next].address) + CAPACITY) % CAPACITY;
      if (from_home >= (next - hole + CAPACITY) % CAPACITY) {
        blocks[hole] = blocks[next];
        hole = next;
      }
    }
    blocks[hole].address = 0;
  }
  unlock();
}

void hook_begin(void) { atomic_store(&region, 1); }
void hook_end(void) { atomic_store(&region, 0); }
long hook_live(int kind) { return live[kind]; }
long hook_peak(int kind) { return peak[kind]; }
long hook_aligned_peak(void) { return aligned_peak; }
long hook_largest_aligned(void) { return largest_aligned; }
void hook_reset_peaks(void) {
  lock();
  for (int kind = 0; kind < KINDS; ++kind) {
    peak[kind] = live[kind];
  }
  aligned_peak = live[ALIGNED] + live[PAGE_ALIGNED];
  largest_aligned = 0;
  unlock();
}

void *malloc(size_t bytes) {
  void *pointer = __libc_malloc(bytes);
  add(pointer, bytes, HEAP);
  return pointer;
}

void *calloc(size_t items, size_t bytes) {
  void *pointer = __libc_calloc(items, bytes);
  add(pointer, items * bytes, HEAP);
  return pointer;
}

void *realloc(void *old, size_t bytes) {
  drop(old); /* if it fails, the old block stays, but is no longer counted */
  void *pointer = __libc_realloc(old, bytes);
  add(pointer, bytes, HEAP);
  return pointer;
}

void free(void *pointer) {
  drop(pointer);
  __libc_free(pointer);
}

static void *aligned(size_t alignment, size_t bytes) {
  void *pointer = __libc_memalign(alignment, bytes);
  add(pointer, bytes, alignment >= PAGE_ALIGNMENT ? PAGE_ALIGNED : ALIGNED);
  return pointer;
}

void *memalign(size_t alignment, size_t bytes) { return aligned(alignment, bytes); }
void *aligned_alloc(size_t alignment, size_t bytes) { return aligned(alignment, bytes); }

int posix_memalign(void **result, size_t alignment, size_t bytes) {
  void *pointer = aligned(alignment, bytes);
  if (pointer == NULL) {
    return ENOMEM;
  }
  *result = pointer;
  return 0;
}

void *mmap(void *address, size_t bytes, int protection, int flags, int file, off_t offset) {
  void *pointer = (void *)syscall(SYS_mmap, address, bytes, protection, flags, file, offset);
  if (pointer != MAP_FAILED && (flags & MAP_ANONYMOUS)) {
    add(pointer, bytes, MAPPED);
  }
  return pointer;
}

void *mmap64(void *address, size_t bytes, int protection, int flags, int file, off_t offset) {
  return mmap(address, bytes, protection, flags, file, offset);
}

int munmap(void *address, size_t bytes) {
  drop(address); /* a partial unmapping counts as one of the whole */
  return (int)syscall(SYS_munmap, address, bytes);
}
