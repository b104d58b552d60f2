/*
 * Indexed min-heap of (time, slot) in two arrays that numpy can see; each slot knows its position.
 * Four children a node: among a million every level is a cache miss or two, so half the levels cost
 * half. Belongs to D, derived: heap_make builds it anew. Garbage in it makes the queue dirty.
 */
#ifndef SHMQ_HEAP_H
#define SHMQ_HEAP_H

#include "layout.h"

typedef struct heap {
	int64_t *when;
	uint32_t *slot;
	_Atomic uint32_t *length;
	shmq_slot_desc *slots;
	_Atomic uint32_t *most;  /* how many entries fit, and how many slots there may be */
	_Atomic uint32_t *dirty; /* set if an entry cannot be right */
} heap;

void heap_push(const heap *h, int64_t when, uint32_t slot);
/* The slot must be in this heap. */
void heap_remove(const heap *h, uint32_t slot);
void heap_change(const heap *h, uint32_t slot, int64_t when);
/* Make a heap of the first *length entries. */
void heap_make(const heap *h);
static inline int64_t heap_first(const heap *h);

#include "atomics.h"
static inline int64_t heap_first(const heap *h)
{
	return ld(h->length) ? h->when[0] : INT64_MAX;
}

#endif
