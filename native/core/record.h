/* nsqd's disk records. */
#ifndef SHMQ_RECORD_H
#define SHMQ_RECORD_H

#include "layout.h"

#define RECORD_HEAD 30u /* 4 length, 8 timestamp, 2 attempts, 16 id */

typedef struct record {
	const uint8_t *body;
	uint64_t length;
	int64_t timestamp;
	uint64_t id;
	uint16_t attempts;
} record;

void record_write(uint8_t *to, const shmq_slot_desc *slot, const uint8_t *body);
/* Returns 1 if a whole record is there; 0 if not (*size: its size, if that much is there); -1 if
 * its length is impossible. */
int record_size(const uint8_t *from, uint64_t length, uint64_t max_msg_size, uint64_t *size);
/* Returns 1 and its size in *used; 0 if it is not whole; -1 if it cannot be right. */
int record_read(const uint8_t *from, uint64_t length, uint64_t max_msg_size, record *out,
                uint64_t *used);
/* Fill a slot whose body is long enough. The caller sets its state, order and position. */
void record_place(shmq_slot_desc *slot, uint8_t *body, const record *from);

#endif
