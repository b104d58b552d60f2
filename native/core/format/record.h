/* nsqd's disk records. */
#ifndef SHMQ_RECORD_H
#define SHMQ_RECORD_H

#include "format/seal.h"
#include "memory/layout.h"
#include "shmq_supervisor.h"

#include <endian.h>
#include <string.h>

static inline uint32_t get_be32(const uint8_t *from)
{
	uint32_t value;

	memcpy(&value, from, sizeof(value));
	return be32toh(value);
}

/* Write an id as 16 hexadecimal digits. Returns the byte after them. */
static inline uint8_t *put_id(uint8_t *to, uint64_t id)
{
	for (int shift = 60; shift >= 0; shift -= 4)
		*to++ = (uint8_t)"0123456789abcdef"[id >> shift & 15];
	return to;
}

/* A message as a record has it, and the rare fields of its slot. */
typedef struct record {
	const uint8_t *block; /* its properties */
	const uint8_t *body;
	uint64_t length; /* of the body */
	int64_t timestamp;
	uint64_t id;
	int64_t expires;     /* EXPIRES */
	uint32_t properties; /* bytes of the block */
	uint16_t attempts;
	uint16_t failures; /* FAILED */
	uint8_t flags;     /* RECORD_FLAGS of enum shmq_slot_flag */
	bool sealed;       /* it gets a tag; of a record from disk: it has one, right or wrong */
	uint8_t tag[SEAL_BYTES];
} record;

/* The flags of a slot that go to disk; PROPERTIES follows from the block. */
#define RECORD_FLAGS                                                                               \
	(SHMQ_SLOT_FAILED | SHMQ_SLOT_EXPIRES | SHMQ_SLOT_WAS_DUE | SHMQ_SLOT_SUSPECT |                \
	 SHMQ_SLOT_CONVICTED | 3u << SHMQ_SLOT_REASON_SHIFT)

/* The message in a slot. body: its first byte; length, properties: as they were checked; the block
 * ends where the body begins. */
record record_of(const shmq_slot_desc *slot, const uint8_t *body, uint32_t length,
                 uint32_t properties);
/* The bytes that its record has on disk. Reads the first bytes of the body. */
uint64_t record_bytes(const record *from);
/* Write its record of `size` bytes. If it would have another size, because something has overwritten
 * the message since record_bytes, a record of zeros is written. */
void record_write(uint8_t *to, uint64_t size, const record *from);
/* Returns 1 if `from` begins with a whole record, and its size in *size; 0 if more bytes are needed
 * (*size is set once 4 bytes are there); -1 if its length is impossible. */
int record_size(const uint8_t *from, uint64_t length, uint64_t max_msg_size, uint64_t *size);
/* Returns 1, the record and its size in *used; 0 if it is not whole; -1 if its length is
 * impossible. */
int record_read(const uint8_t *from, uint64_t length, uint64_t max_msg_size, record *out,
                uint64_t *used);
/* The bytes that the message takes in memory. */
static inline uint64_t record_length(const record *from)
{
	return from->properties + from->length;
}
/* Fill a slot whose block is long enough for record_length bytes. The caller sets its state, order
 * and position. sealed: whether the tag was right. */
void record_place(shmq_slot_desc *slot, uint8_t *to, const record *from, bool sealed);
/* Make the tag of a message that is sealed. key: of the instance; topic: its name. */
void record_seal(record *r, const uint8_t *key, const char *topic);
/* Returns true if a record from disk has the right tag. */
bool record_is_sealed(const record *r, const uint8_t *key, const char *topic);

#endif
