/*
 * Message bodies: one region, segregated free lists (two levels), boundary tags, coalescing.
 * Belongs to P. All of it is derived: a rebuild calls arena_reset, then arena_claim for every block
 * a slot owns in ascending order, then arena_seal.
 *
 *   block: { u64 size | flags, u64 size of the block before } body ...   size a multiple of 64
 *   the last 64 bytes of the committed part are a sentinel block that is never free.
 *
 * Lists and tags lie in shared memory, so any of them may be garbage. No function here reads or
 * writes outside [0, committed). A function that meets impossible values reports it, and the caller
 * has the whole arena rebuilt.
 */
#ifndef SHMQ_ARENA_H
#define SHMQ_ARENA_H

#include "memory/layout.h"

#include <stdbool.h>

#define ARENA_FAILED UINT64_MAX       /* no block is large enough */
#define ARENA_BROKEN (UINT64_MAX - 1) /* lists or tags are garbage: rebuild */

/* The size in bytes of a block for `length` bytes of body. */
uint64_t arena_block_size(uint64_t length);
void arena_reset(shmq_arena_desc *a);
/* Make the arena one free block over [0, committed). */
void arena_init(shmq_arena_desc *a, uint8_t *base, uint64_t committed);
/* Allocate a body of at least `length` bytes. Returns its offset, and its real size in `capacity`;
 * or ARENA_FAILED, ARENA_BROKEN. */
uint64_t arena_alloc(shmq_arena_desc *a, uint8_t *base, uint64_t committed, uint64_t length,
                     uint32_t *capacity);
/* Returns true if a block in use has exactly this body. */
bool arena_owns(const uint8_t *base, uint64_t committed, uint64_t body, uint32_t capacity);
/* Returns false if there is no such block, or if its neighbours are garbage. */
bool arena_free(shmq_arena_desc *a, uint8_t *base, uint64_t committed, uint64_t body,
                uint32_t capacity);
/* Add the bytes from `old` to `committed`. Returns false if the lists or tags are garbage. */
bool arena_extend(shmq_arena_desc *a, uint8_t *base, uint64_t old, uint64_t committed);

/* The rebuild. `cursor` begins as { 0, 0 }. arena_claim returns false if the block overlaps
 * another one or lies outside. */
typedef struct arena_cursor {
	uint64_t at, before;
} arena_cursor;
bool arena_claim(shmq_arena_desc *a, uint8_t *base, uint64_t committed, arena_cursor *cursor,
                 uint64_t body, uint32_t capacity);
void arena_seal(shmq_arena_desc *a, uint8_t *base, uint64_t committed, arena_cursor *cursor);

#endif
