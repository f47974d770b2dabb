// Runs the kernels of device_copy.cu on the host: a loop over blocks and threads, every access checked
// against the memory that the test has announced and against the alignment of its type.
#include <cstddef>
#include <cstdint>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline

struct Dim { unsigned x, y, z; };
static Dim blockIdx, threadIdx, blockDim, gridDim;
struct alignas(16) uint4 { unsigned x, y, z, w; };

struct Region { uintptr_t start, stop; bool writable; };
static std::vector<Region> regions;
static long long faults = 0;

static bool allowed(const void *address, size_t size, bool write)
{
    const uintptr_t at = reinterpret_cast<uintptr_t>(address);
    if (at % size) { faults++; return false; }
    for (const Region &region : regions)
        if (at >= region.start && at + size <= region.stop && (!write || region.writable)) return true;
    faults++;
    return false;
}

template <typename T> static T checked_load(const T *address)
{
    return allowed(address, sizeof(T), false) ? *address : T();
}

template <typename T> static void checked_store(T *address, T value)
{
    if (allowed(address, sizeof(T), true)) *address = value;
}

#define LOAD(address) checked_load(address)
#define STORE(address, value) checked_store(address, value)
#include "device_copy.cu"

typedef void (*Kernel)(const i64 *, i64, i64, const i64 *, const i64 *, i64, i64);

extern "C" void shim_reset() { regions.clear(); faults = 0; }
extern "C" void shim_region(uintptr_t start, size_t size, int writable)
{
    regions.push_back({start, start + size, writable != 0});
}
extern "C" long long shim_faults() { return faults; }

extern "C" void shim_launch(Kernel kernel, unsigned grid, unsigned threads, const i64 *layers, i64 first_layer,
                            i64 layer_count, const i64 *block_ids, const i64 *slots, i64 parts, i64 part_words)
{
    gridDim = {grid, 1, 1};
    blockDim = {threads, 1, 1};
    for (unsigned block = 0; block < grid; block++)
        for (unsigned thread = 0; thread < threads; thread++) {
            blockIdx = {block, 0, 0};
            threadIdx = {thread, 0, 0};
            kernel(layers, first_layer, layer_count, block_ids, slots, parts, part_words);
        }
}
