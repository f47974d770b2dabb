// Blocks between an engine's paged cache, which has its layers apart, and slots, which have a block's layers
// one after the other. One launch moves any number of blocks and layers; device_copy.py works out the geometry.
//
// An item is one block of one layer, cut into `parts`; each group of threads copies one part of one item,
// neighbouring threads neighbouring words. layers[4 * i ...] are, for layer i: the address of its block 0, the
// bytes from one of its blocks to the next, the offset of its bytes in a slot, and how many words they are.
// slots[b] is the address of the slot of block b. All of these are multiples of the word.

#ifndef LOAD
#define LOAD(address) (*(address))
#define STORE(address, value) (*(address) = (value))
#endif

#ifdef __CUDACC__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL
#endif

typedef long long i64;

// Loads of a thread that are under way together: a store between them might be to what the next one reads, as
// far as the compiler knows, and each would wait for the one before.
static const int AT_ONCE = 8;

template <typename Word, bool to_slots>
__device__ __forceinline__ void copy_part(const i64 *layers, i64 first_layer, i64 layer_count,
                                          const i64 *block_ids, const i64 *slots, i64 parts, i64 part_words)
{
    const i64 at = blockIdx.x;
    const i64 part = at % parts;
    const i64 item = at / parts;
    const i64 block = item / layer_count;
    const i64 *layer = layers + 4 * (first_layer + item % layer_count);
    const i64 start = part * part_words;
    const i64 words = LOAD(layer + 3);
    const i64 stop = start + part_words < words ? start + part_words : words;
    Word *paged = reinterpret_cast<Word *>(LOAD(layer) + LOAD(block_ids + block) * LOAD(layer + 1));
    Word *slot = reinterpret_cast<Word *>(LOAD(slots + block) + LOAD(layer + 2));
    const Word *from = to_slots ? paged : slot;
    Word *to = to_slots ? slot : paged;
    for (i64 word = start + threadIdx.x; word < stop; word += AT_ONCE * blockDim.x) {
        Word held[AT_ONCE];
        UNROLL
        for (int i = 0; i < AT_ONCE; i++)
            if (word + i * blockDim.x < stop) held[i] = LOAD(from + word + i * blockDim.x);
        UNROLL
        for (int i = 0; i < AT_ONCE; i++)
            if (word + i * blockDim.x < stop) STORE(to + word + i * blockDim.x, held[i]);
    }
}

#define KERNELS(bytes, Word)                                                                              \
    extern "C" __global__ void gather_##bytes(const i64 *layers, i64 first_layer, i64 layer_count,         \
                                              const i64 *block_ids, const i64 *slots, i64 parts,           \
                                              i64 part_words)                                              \
    {                                                                                                      \
        copy_part<Word, true>(layers, first_layer, layer_count, block_ids, slots, parts, part_words);      \
    }                                                                                                      \
    extern "C" __global__ void scatter_##bytes(const i64 *layers, i64 first_layer, i64 layer_count,        \
                                               const i64 *block_ids, const i64 *slots, i64 parts,          \
                                               i64 part_words)                                             \
    {                                                                                                      \
        copy_part<Word, false>(layers, first_layer, layer_count, block_ids, slots, parts, part_words);     \
    }

KERNELS(16, uint4)
KERNELS(8, unsigned long long)
KERNELS(4, unsigned int)
KERNELS(2, unsigned short)
KERNELS(1, unsigned char)
