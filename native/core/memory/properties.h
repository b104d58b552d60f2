/*
 * Properties: small named values that a message carries beside its body. They are a block of entries
 * in front of the body; shmq.h has its format. Anyone who maps the segment can overwrite a block, so
 * every reader goes through shmq_property_next, which stays inside it.
 */
#ifndef SHMQ_PROPERTIES_H
#define SHMQ_PROPERTIES_H

#include "memory/layout.h"
#include "shmq.h"

#include <stdbool.h>
#include <stdint.h>

/* Bytes of an entry besides its name and its value. */
#define PROPERTY_HEAD 3u

/* Returns true if the name is one of those that shmq writes to disk for itself. */
bool property_is_internal(const shmq_property *p);
/* Write an entry whose name and room the caller has checked. Returns the byte after it. */
uint8_t *property_write(uint8_t *to, const shmq_property *p);
/* Returns 0 if n blocks may be published; else the status of shmq_properties_check, with the
 * message's number in the sentence. */
int properties_check_all(const shmq_body *blocks, uint32_t n);

/* Returns true if the slot's words on its properties can be true. */
static inline bool properties_can_be(uint8_t flags, uint32_t properties, uint32_t length)
{
	uint32_t bytes = properties & ~SHMQ_SLOT_SEALED;

	return !(flags & SHMQ_SLOT_PROPERTIES) ||
	       (properties && bytes <= length && bytes <= SHMQ_PROPERTIES_MOST);
}

#endif
