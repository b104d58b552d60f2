/*
 * shmq: the contract of the core for leases. shmq.h includes this file at its end, and its first
 * comment holds here too.
 */
#ifndef SHMQ_PUBLIC_LEASE_H
#define SHMQ_PUBLIC_LEASE_H

#include "shmq.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * A lease is a set of messages that is held under a name. Any process may read it, in parts, as
 * often as it likes, and gets the same rows each time; then it is finished or returned as a whole.
 *
 * A lease holder is the name together with its present owner. A process that opens the name becomes
 * its next incarnation, and every earlier one is fenced (SHMQ_LEASE_FENCED). An incarnation is 64
 * random bits: who knows them is the owner. The leases are returned to the head of the queue, with attempts + 1, when the holder gave no sign of life for
 * `ttl`, or had no owner for `grace`; a death of the owner begins `grace` at once.
 *
 * The state word of a lease decides over all of its messages. A holder's leases have rising ids.
 */
typedef struct shmq_lease_holder {
	uint32_t queue, index;
	uint64_t serial, incarnation;
} shmq_lease_holder;
typedef struct shmq_lease {
	uint64_t id, parent, bytes;
	uint32_t count, parts, replays;
	uint32_t on_disk; /* of `count`: leased in place on disk */
} shmq_lease;
/* Whole records on disk from the queue's read position on, as the caller found them in its
 * files. */
typedef struct shmq_run {
	uint64_t from, to, bytes; /* positions; bytes of bodies */
	uint32_t count, parts;
	const uint64_t *at; /* position of each part's first record */
} shmq_run;

/* The name of a lease holder, and its times in ns; 0 for never. */
typedef struct shmq_lease_settings {
	const char *name;
	int64_t ttl_ns, grace_ns;
	/* A hash of the secret with which the network may open the name again; 0, 0: it may not. */
	uint64_t proof[2];
	/* For a process that speaks for holders which are elsewhere: a hash of whose the holder is (0: it
	 * is this process's own); whether that is a user who has proven who he is, so that he may open
	 * what is his without the secret; and the most names of the queue that are of one `whose`. */
	uint64_t whose;
	bool known;
	uint32_t most;
} shmq_lease_settings;
/* The messages that a new lease is to have. */
typedef struct shmq_lease_wish {
	uint64_t parent;     /* id of the lease that the caller took before, 0 if none; only stored */
	uint64_t max_bytes;  /* most bytes of bodies together; at least one message is leased */
	uint32_t n;          /* most messages */
	uint32_t parts;      /* most parts to split them into, 1 to 32 */
	uint32_t most;       /* most open leases of holders of the same `whose`; 0: no limit */
	const shmq_run *run; /* NULL, or the records on disk that follow the messages in memory */
} shmq_lease_wish;
/* Messages in columns. ids, timestamps (CLOCK_REALTIME ns), attempts (the present delivery
 * included): one entry for each message. offsets: one entry more, where each body begins in `data`
 * and the last one ends. data: the bodies one after the other. */
typedef struct shmq_columns {
	uint64_t *ids;
	int64_t *timestamps;
	int32_t *attempts, *offsets;
	uint8_t *data;
} shmq_columns;

/*
 * Become the owner of a name. SHMQ_TABLE_FULL: 64 other names hold leases or have an owner, or `most`
 * names of this `whose` hold leases.
 *
 * A process that may attach opens any name for itself. For somebody else (`whose`) it opens a name
 * that has an owner or leases only with the secret of its last open, or if it is of the same `whose`
 * and that is `known`: else SHMQ_LEASE_FENCED, and nothing has changed. Where there is no room, the name that holds nothing and was silent for the
 * longest time gives way: of the same `whose` if that has `most`, else one without an owner, else one
 * that was opened for somebody else.
 */
int shmq_lease_holder_open(shmq_broker *b, uint32_t queue, uint64_t serial,
                           const shmq_lease_settings *settings, int64_t until,
                           shmq_lease_holder *out);
/* Give a sign of life, as every call with the holder does. SHMQ_LEASE_FENCED. */
int shmq_lease_holder_touch(shmq_broker *b, const shmq_lease_holder *l, int64_t until);
/* Become the owner in place of the process that was, as the same incarnation: it is this process's
 * death now that begins `grace`. A sign of life. For the processes that speak for a holder which is
 * elsewhere. SHMQ_LEASE_FENCED. death: there is one owner or the other. */
int shmq_lease_holder_adopt(shmq_broker *b, const shmq_lease_holder *l, int64_t until);
/* Leave the name without an owner; its leases wait for `grace`. SHMQ_LEASE_FENCED. */
int shmq_lease_holder_close(shmq_broker *b, const shmq_lease_holder *l, int64_t until);
/* The same, but only if this process is the owner: another that speaks for the holder stays. No sign
 * of life. SHMQ_LEASE_FENCED. death: it has the owner or none. */
int shmq_lease_holder_leave(shmq_broker *b, const shmq_lease_holder *l, int64_t until);
/*
 * Lease messages as wished, in the order in which a take would hand them out. SHMQ_EMPTY: no
 * message is available, or the limit of held messages is reached. SHMQ_TABLE_FULL: 64 leases of
 * this queue are open, or `most` of this holder's `whose`. SHMQ_LEASE_FENCED.
 *
 * The lease takes the whole run; or none of it, if that would exceed n or max_bytes or other
 * messages come first. The run stays on disk and is read there; nothing is read back into memory
 * until the lease ends. One lease of a queue at a time has a run. SHMQ_EMPTY, too, if the run does
 * not begin at the read position; nothing was taken then.
 * death: all of the messages are in the lease, or all are where they were.
 */
int shmq_lease_take(shmq_broker *b, const shmq_lease_holder *l, const shmq_lease_wish *wish,
                    int64_t until, shmq_lease *out);
/* Describe a lease. replay: count one more reading of it. SHMQ_LEASE_LOST: the holder has no such
 * lease. */
int shmq_lease_look(shmq_broker *b, const shmq_lease_holder *l, uint64_t id, bool replay,
                    int64_t until, shmq_lease *out);
/* List the holder's open leases in the order of their ids, up to n of them. */
int shmq_lease_list(shmq_broker *b, const shmq_lease_holder *l, shmq_lease *out, uint32_t n,
                    int64_t until, uint32_t *count);
/* Finish every lease of the holder up to the id `through`. messages: their number. SHMQ_LEASE_LOST:
 * that lease is not held and was not finished; those before it are finished. death: each lease is
 * finished or is not. */
int shmq_lease_finish(shmq_broker *b, const shmq_lease_holder *l, uint64_t through, int64_t until,
                      uint64_t *messages);
/* Return one lease to the head of the queue. messages: their number. SHMQ_LEASE_LOST. death: all of
 * its messages are returned, or none. */
int shmq_lease_return(shmq_broker *b, const shmq_lease_holder *l, uint64_t id, int64_t until,
                      uint64_t *messages);
/* End the lease of any holder, for administrators: return it (back) or finish it. */
int shmq_lease_end(shmq_broker *b, uint32_t queue, uint64_t serial, uint64_t id, bool back,
                   int64_t until, uint64_t *messages);
/*
 * Reading takes no lock. shmq_lease_open sets a cursor to the first message of a part. Then
 * shmq_lease_measure tells how many of the next messages fit: at most `rows`, with at most `bytes`
 * of bodies, but at least one if any is left. shmq_lease_copy copies them and moves the cursor.
 * to: columns for `count` messages and `size` bytes of bodies.
 * SHMQ_LEASE_LOST: the lease was ended meanwhile; discard the copies.
 */
typedef struct shmq_lease_cursor {
	uint32_t queue, part, slot, left;
	uint64_t serial, id;
	uint64_t from, to; /* the part's records on disk, which follow those in memory */
} shmq_lease_cursor;
int shmq_lease_open(shmq_broker *b, uint32_t queue, uint64_t serial, uint64_t id, uint32_t part,
                    shmq_lease_cursor *out);
int shmq_lease_measure(shmq_broker *b, const shmq_lease_cursor *c, uint32_t rows, uint64_t bytes,
                       uint32_t *count, uint64_t *size);
int shmq_lease_copy(shmq_broker *b, shmq_lease_cursor *c, uint32_t count, uint64_t size,
                    const shmq_columns *to);
/* Read the properties of the next `count` messages; the cursor stays where it is. size: of all their
 * blocks. to: NULL to ask for the size. Else `to->blocks` has room for *size bytes, and gets the
 * blocks one after the other; `to->offsets` gets count + 1 entries, where each begins and the last one
 * ends. SHMQ_LEASE_LOST; SHMQ_TOO_BIG: 2 GiB or more, read fewer at a time. */
typedef struct shmq_blocks {
	int32_t *offsets;
	uint8_t *blocks;
} shmq_blocks;
int shmq_lease_properties(shmq_broker *b, const shmq_lease_cursor *c, uint32_t count,
                          uint64_t *size, const shmq_blocks *to);
/* Sleep until a message may be available for a lease; as shmq_consumer_wait. */
int shmq_lease_wait(shmq_broker *b, const shmq_lease_holder *l, int64_t deadline);

#ifdef SHMQ_KILLPOINTS
/* Send this process SIGKILL at the `count`-th passing of the named point (1: the first). NULL
 * disarms. */
void shmq_killpoint_arm(const char *name, uint32_t count);
#endif

#ifdef __cplusplus
}
#endif

#endif
