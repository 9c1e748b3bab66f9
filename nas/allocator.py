"""Memory allocator settings for training on the CPU.

By default glibc returns every large tensor to the kernel and pages it in anew. Thresholds above the size of a
micro-batch's tensors keep freed memory in the process. They must be in the environment before it starts.

Source: mallopt(3), https://man7.org/linux/man-pages/man3/mallopt.3.html
"""

THRESHOLD_BYTES = 32 * 1024**2  # glibc refuses a larger M_MMAP_THRESHOLD (HEAP_MAX_SIZE / 2)

ALLOCATOR_ENV: dict[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": str(THRESHOLD_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(1024**3),
    "MALLOC_TOP_PAD_": str(THRESHOLD_BYTES),
}
