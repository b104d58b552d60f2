/* nsqd's disk records. */
#ifndef SHMQ_RECORD_H
#define SHMQ_RECORD_H

#include "layout.h"
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

typedef struct record {
	const uint8_t *body;
	uint64_t length;
	int64_t timestamp;
	uint64_t id;
	uint16_t attempts;
} record;

void record_write(uint8_t *to, const shmq_slot_desc *slot, const uint8_t *body);
/* Returns 1 if `from` begins with a whole record, and its size in *size; 0 if more bytes are needed
 * (*size is set once 4 bytes are there); -1 if its length is impossible. */
int record_size(const uint8_t *from, uint64_t length, uint64_t max_msg_size, uint64_t *size);
/* Returns 1, the record and its size in *used; 0 if it is not whole; -1 if its length is
 * impossible. */
int record_read(const uint8_t *from, uint64_t length, uint64_t max_msg_size, record *out,
                uint64_t *used);
/* Fill a slot whose body is long enough. The caller sets its state, order and position. */
void record_place(shmq_slot_desc *slot, uint8_t *body, const record *from);

#endif
