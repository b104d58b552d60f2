/*
 * Runs of commands and frames of nsqd's TCP protocol, for the gateway. Bytes in, bytes out: nothing
 * here touches shared memory, except that it reads the bodies of messages.
 */
#ifndef SHMQ_WIRE_H
#define SHMQ_WIRE_H

#include "shmq.h"

#ifdef __cplusplus
extern "C" {
#endif

#define SHMQ_WIRE_ID 16u    /* hexadecimal digits of an id */
#define SHMQ_WIRE_FIN 21u   /* bytes of a FIN line */
#define SHMQ_WIRE_FRAME 34u /* bytes of a message frame without its body */

/* Bytes of a client, and how to read them. */
typedef struct shmq_wire_input {
	const void *data;
	uint64_t length;
	uint64_t max_msg_size;
	uint64_t max_body_size; /* of an MPUB; shmq_wire_batch alone reads it */
	const void *line;       /* the line of each command, with its end; not of shmq_wire_bodies */
	uint64_t line_length;
} shmq_wire_input;
/* Count how many of n bodies (int32 big-endian size, then as many bytes) are whole, and how many
 * bytes they take. bodies: room for n of them, or NULL. SHMQ_INVALID: the size of the next one
 * is `bad`, which is not from 1 to max_msg_size; the bodies before it are counted. */
int shmq_wire_bodies(const shmq_wire_input *in, uint32_t n, shmq_body *bodies, uint32_t *whole,
                     uint64_t *used, int64_t *bad);
/* The bodies of up to n whole PUB commands at the start of the data, all with the same line.
 * Returns their number; used: how many bytes the commands take. A command that is not whole, or
 * whose size is wrong, ends the run. */
uint32_t shmq_wire_publishes(const shmq_wire_input *in, uint32_t n, shmq_body *bodies,
                             uint64_t *used);
/* The bodies of the MPUB command of this line at the start of the data. Returns 0 with no bytes
 * used if it is not whole, has more than n bodies, or is malformed. */
uint32_t shmq_wire_batch(const shmq_wire_input *in, uint32_t n, shmq_body *bodies, uint64_t *used);
/* Read an id of 16 lower-case hexadecimal digits. Returns false if the text is not an id. */
bool shmq_wire_id(const void *text, uint64_t *id);
/* The ids of up to n FIN lines at the start of `data`, and how many bytes those take. */
uint32_t shmq_wire_finishes(const void *data, uint64_t length, uint64_t *ids, uint32_t n,
                            uint64_t *used);
/* Write the frame of a delivery. Returns its length, SHMQ_WIRE_FRAME + the body's. */
uint64_t shmq_wire_frame(const shmq_message *m, void *to);

/* The deliveries of one consumer by id, in private memory, for one thread at a time. */
typedef struct shmq_window shmq_window;
int shmq_window_open(shmq_window **out);
void shmq_window_free(shmq_window *w);
/* Make room for n more deliveries. Forgets those that are no longer in flight to `c`, so the window
 * grows only with those that are. */
int shmq_window_reserve(shmq_window *w, const shmq_consumer *c, uint32_t n);
void shmq_window_add(shmq_window *w, const shmq_message *m);
/* Find, or take out, the delivery with this id: its id, word and slot. It may have timed out
 * since. */
bool shmq_window_find(const shmq_window *w, uint64_t id, shmq_message *out);
bool shmq_window_remove(shmq_window *w, uint64_t id, shmq_message *out);

#ifdef __cplusplus
}
#endif
#endif
