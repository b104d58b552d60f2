/*
 * shmq: the core's contract. Nothing here knows Python, names of shared memory, or files.
 *
 * A process maps the directory (shmq_broker_open), takes a client entry (shmq_broker_attach) and
 * from then on publishes through producers and takes through consumers. Every call returns 0 or a
 * negative status from the table below; outputs go through pointers and are untouched on failure
 * unless said otherwise. No call makes a Python object, touches a disk or logs while it
 * holds a lock; none aborts.
 *
 * Time. `until` is an absolute CLOCK_MONOTONIC time in nanoseconds up to which a call may wait for
 * LOCKS; 0 means: only try, SHMQ_AGAIN if one is held elsewhere (nothing was done; call again).
 * Nothing but the ..._wait functions and shmq_request_wait waits for anything else.
 *
 * Mapping. The core knows no names: when an operation meets a queue this process has not mapped it
 * returns SHMQ_NEED_MAP (nothing was done); shmq_broker_missing says which, the caller opens it and
 * calls shmq_broker_map, and tries again.
 *
 * Death. Any call may end at any instruction. What a death leaves, the next one to take the lock
 * repairs (EOWNERDEAD -> dirty -> rebuild under P and D); what a dead client held, the reaper gives
 * back. The sentence "death:" at a call says which side of its commit word decides.
 *
 * Fork. After fork() every handle answers SHMQ_FORKED in the child; the child attaches anew.
 *
 * Threads. Any thread may use any handle; a handle must not be closed while others use it.
 */
#ifndef SHMQ_H
#define SHMQ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, value, python exception or "", sentence) */
#define SHMQ_STATUS_TABLE(X)                                                                       \
	X(OK, 0, "", "done")                                                                           \
	X(AGAIN, -1, "Busy", "a lock is held by another thread")                                           \
	X(NEED_MAP, -2, "", "a queue must be mapped first")                                            \
	X(NEED_BACKLOG, -3, "", "the topic needs a backlog queue")                                     \
	X(EMPTY, -4, "", "nothing to take")                                                            \
	X(FORKED, -5, "", "this handle belongs to the parent process")                                 \
	X(FULL, -6, "Full", "no room in memory for the message")                                       \
	X(TOO_BIG, -7, "MessageTooBig", "the message or batch can never fit")                          \
	X(BAD_NAME, -8, "BadName", "not a valid topic or channel name")                                \
	X(NOT_IN_FLIGHT, -9, "NotInFlight", "the message is not in flight to this consumer")           \
	X(GONE, -10, "Gone", "the topic, channel or broker was deleted")                               \
	X(LAYOUT, -11, "LayoutMismatch", "the segment was not made by this version of shmq")           \
	X(TOO_MANY_CLIENTS, -12, "TooManyClients", "every client entry is taken")                      \
	X(NOT_RUNNING, -13, "NotRunning", "no supervisor is running")                                  \
	X(NO_MEMORY, -14, "ShmqError", "the mapping was refused (address space or memory limit)")      \
	X(NO_SPACE, -15, "Full", "the shared memory file system is full")                              \
	X(INVALID, -16, "BadArgument", "an argument is out of range")                                    \
	X(CLOSED, -17, "Gone", "the handle was closed")                                                \
	X(TIMEOUT, -18, "", "the time is over")                                                        \
	X(INTERRUPTED, -19, "", "a signal came")                                                       \
	X(TABLE_FULL, -20, "ShmqError", "a table of the directory is full")                            \
	X(CORRUPT, -21, "LayoutMismatch", "the segment's contents cannot be right")                     \
	X(LEASE_LOST, -22, "LeaseLost", "the lease is not held any more")                              \
	X(LEASE_FENCED, -23, "LeaseFenced", "somebody else leases under this name now")                \
	X(REPEATED, -24, "", "these messages were published before")

enum shmq_status {
#define X(name, value, exception, sentence) SHMQ_##name = value,
	SHMQ_STATUS_TABLE(X)
#undef X
};
const char *shmq_status_name(int status);
const char *shmq_status_sentence(int status);
/* What this thread's last failed open or create found, in words ("" if nothing to add). */
const char *shmq_why(void);

typedef struct shmq_broker shmq_broker;
typedef struct shmq_producer shmq_producer;
typedef struct shmq_consumer shmq_consumer;

typedef struct shmq_limits {
	int64_t msg_timeout_ns, max_msg_timeout_ns, max_req_timeout_ns;
	uint64_t max_msg_size;
	uint64_t arena_size;
	uint32_t node_id, mem_queue_size, inflight_slots;
} shmq_limits;

int64_t shmq_now(void);      /* CLOCK_MONOTONIC ns */
int64_t shmq_realtime(void); /* CLOCK_REALTIME ns */
uint32_t shmq_fork_generation(void); /* raised in every forked child */

/* 1 to 64 bytes of [.a-zA-Z0-9_-], optionally ending in "#ephemeral" (counted). */
bool shmq_name_valid(const char *name, size_t length);
bool shmq_name_ephemeral(const char *name, size_t length);

/* ---- layout table, for numpy ---------------------------------------------------------------- */
typedef struct shmq_field {
	const char *structure, *name;
	const char *dtype; /* numpy: "<u8", "<i4", "S80", "V40" or the name of another structure */
	uint32_t offset, size, count;
} shmq_field;
const shmq_field *shmq_layout(size_t *count);
uint32_t shmq_layout_size(const char *structure); /* 0: unknown */
uint64_t shmq_layout_fingerprint(void);
uint32_t shmq_layout_version(void);
/* States, table sizes and kinds by name (without SHMQ_). */
typedef struct shmq_constant {
	const char *name;
	int64_t value;
} shmq_constant;
const shmq_constant *shmq_constants(size_t *count);

/* ---- segments: made by the supervisor only -------------------------------------------------- */

uint64_t shmq_directory_bytes(void);
/* Size, reserve and fill a new directory behind `fd` (empty, of size 0); READY is stored last.
 * SHMQ_NO_SPACE on a full tmpfs, SHMQ_NO_MEMORY if it cannot be mapped. death: a raw segment, which
 * no opener accepts and the next supervisor replaces. */
int shmq_directory_create(int fd, const shmq_limits *limits);
uint64_t shmq_queue_bytes(const shmq_limits *limits);

/* ---- attachment ----------------------------------------------------------------------------- */

enum shmq_kind { SHMQ_AS_CLIENT = 0, SHMQ_AS_SUPERVISOR = 1, SHMQ_AS_GATEWAY = 2 };

/* Map and check the directory: SHMQ_LAYOUT (shmq_why has the sentence), SHMQ_NO_MEMORY. */
int shmq_broker_open(int fd, shmq_broker **out);
/* Take a client entry and its life lock. death: an entry in state ATTACHING or LIVE whose life lock
 * is free; the reaper frees it. SHMQ_TOO_MANY_CLIENTS, SHMQ_NOT_RUNNING (broker stopping). */
int shmq_broker_attach(shmq_broker *b, enum shmq_kind kind, int64_t until);
/* Give back everything the client holds, then the entry. Idempotent. */
int shmq_broker_detach(shmq_broker *b, int64_t until);
/* Unmap. In a forked child this only forgets (the parent's entry stays the parent's). */
void shmq_broker_close(shmq_broker *b);
bool shmq_broker_forked(const shmq_broker *b);
uint32_t shmq_broker_client(const shmq_broker *b); /* index of the client entry */
/* Which queue the last SHMQ_NEED_MAP of this thread was about. */
void shmq_broker_missing(const shmq_broker *b, uint32_t *queue, uint64_t *serial);
int shmq_broker_map(shmq_broker *b, uint32_t queue, uint64_t serial, int fd);
/* Forget the mapping of a queue that is gone (pages are freed when no handle uses them). */
void shmq_broker_unmap(shmq_broker *b, uint32_t queue, uint64_t serial);
/* Base and mapped length of a segment, for read-only views; queue SHMQ_AS_DIRECTORY: the directory.
 * Takes a reference on the mapping; give it back with shmq_segment_release. */
#define SHMQ_AS_DIRECTORY UINT32_MAX
int shmq_segment_view(shmq_broker *b, uint32_t queue, const void **base, uint64_t *length,
                      void **reference);
void shmq_segment_release(void *reference);
/* Are there pages behind [at, at + bytes) of a mapped segment, now at the latest? Else to read there
 * is a SIGBUS. True of what is no mapping. */
bool shmq_segment_has_pages(const void *base, uint64_t at, uint64_t bytes);
/* Does a supervisor hold its life lock? (Exact at once, also after a kill -9.) */
bool shmq_supervisor_alive(shmq_broker *b);
/* Was the instance stopped in order, or is it being stopped? Its queues are Gone then. */
bool shmq_broker_stopped(const shmq_broker *b);

/* ---- registry ------------------------------------------------------------------------------- */

int shmq_topic_find(shmq_broker *b, const char *name, uint32_t *topic, uint32_t *generation);
/* channel NULL: the topic's backlog queue. SHMQ_GONE if there is none. */
int shmq_queue_find(shmq_broker *b, uint32_t topic, const char *channel, uint32_t *queue,
                    uint64_t *serial);

/* Requests to the supervisor: create or delete. post, wait (in slices), end. */
enum shmq_request_kind {
	SHMQ_CREATE_TOPIC = 1,
	SHMQ_CREATE_CHANNEL = 2,
	SHMQ_CREATE_BACKLOG = 3,
	SHMQ_DELETE_TOPIC = 4,
	SHMQ_DELETE_CHANNEL = 5
};
int shmq_request_post(shmq_broker *b, enum shmq_request_kind kind, const char *topic,
                      const char *channel, int64_t until, uint32_t *ticket);
/* Wait for its answer: 0 or the supervisor's status; SHMQ_TIMEOUT, SHMQ_INTERRUPTED,
 * SHMQ_NOT_RUNNING if the supervisor is dead. */
int shmq_request_wait(shmq_broker *b, uint32_t ticket, int64_t deadline);
void shmq_request_end(shmq_broker *b, uint32_t ticket);

int shmq_topic_pause(shmq_broker *b, uint32_t topic, uint32_t generation, bool paused,
                     int64_t until);
int shmq_channel_pause(shmq_broker *b, uint32_t queue, uint64_t serial, bool paused,
                       int64_t until);
/* Drop READY, BACK, INFLIGHT, DEFERRED and SPILLING messages and what is on disk (nsqd's empty), not
 * what is leased;
 * files of chunks up to deferred_gone are to be deleted.
 * `dropped`: how many. death: some are dropped, some not; nothing is half. */
int shmq_queue_empty(shmq_broker *b, uint32_t queue, uint64_t serial, int64_t until,
                     uint64_t *dropped);

/* ---- publish -------------------------------------------------------------------------------- */

typedef struct shmq_body {
	const void *data;
	uint64_t length;
} shmq_body;

int shmq_producer_open(shmq_broker *b, uint32_t topic, uint32_t generation, shmq_producer **out);
void shmq_producer_close(shmq_producer *p);
/*
 * Publish n bodies to every channel of the topic, all or nothing. due: 0, or CLOCK_REALTIME ns
 * before which they are not delivered, at most max_req_timeout from now. first_id: id of the first; the k-th has first_id + k * 1024.
 * SHMQ_FULL: some queue lacks room (shmq_producer_wait waits for it); SHMQ_TOO_BIG: never fits;
 * SHMQ_NEED_BACKLOG: ask the supervisor for a backlog queue; SHMQ_GONE: the topic was deleted.
 * Bodies over SHMQ_LARGE bytes are copied outside the lock (as loans).
 * death: before topic.committed is stored, no channel has any of them; after, all have all.
 */
int shmq_publish(shmq_producer *p, const shmq_body *bodies, uint32_t n, int64_t due, int64_t until,
                 uint64_t *first_id);
#ifndef SHMQ_LARGE
#define SHMQ_LARGE 65536u
#endif

/*
 * Publishing in epochs, each of which may be repeated: whoever publishes under a key says which
 * epoch it is in and that these messages are number `after` to `upto` of it. The topic remembers
 * for each key the last epoch and how far it got, decided by the same store as the publish.
 * SHMQ_REPEATED: it is that far already, or in a later epoch; nothing was published. SHMQ_INVALID:
 * messages before `after` are missing. SHMQ_TABLE_FULL: every place is another topic's.
 * Of a topic's keys the one used longest ago is forgotten when there are too many (256 in all).
 * death: messages and mark are both there or neither is.
 */
typedef struct shmq_mark {
	uint64_t key[2];
	uint64_t epoch; /* below 2^64 - 2 */
	uint64_t after, upto;
} shmq_mark;
int shmq_publish_marked(shmq_producer *p, const shmq_body *bodies, uint32_t n,
                        const shmq_mark *mark, int64_t until, uint64_t *first_id);
/* epoch: the last one + 1, 0: none; upto: how far it got. */
int shmq_mark_read(shmq_producer *p, const uint64_t key[2], int64_t until, shmq_mark *out);
/* Sleep until the queue that was full may have room, or `deadline` (monotonic ns), at most 10 ms
 * blind. 0: look again; SHMQ_TIMEOUT; SHMQ_INTERRUPTED. */
int shmq_producer_wait(shmq_producer *p, int64_t deadline);

/* A loan: a slot and body of `length` bytes in every channel, filled in place, then published. */
typedef struct shmq_loan shmq_loan;
int shmq_loan_begin(shmq_producer *p, uint64_t length, int64_t until, shmq_loan **out);
void *shmq_loan_data(shmq_loan *loan);
/* Publish only its first `length` bytes: 1 to what it was begun with, which the caller sees to. The
 * rest stays the message's memory, with what is in it, until it is finished. */
void shmq_loan_truncate(shmq_loan *loan, uint64_t length);
/* Publish. SHMQ_FULL: a channel that is new since shmq_loan_begin lacks room; the loan stays. */
int shmq_loan_commit(shmq_loan *loan, int64_t due, int64_t until, uint64_t *id);
int shmq_loan_cancel(shmq_loan *loan, int64_t until);
/* Free the handle after commit or cancel succeeded, or in a forked child. */
void shmq_loan_free(shmq_loan *loan);

/* ---- take ----------------------------------------------------------------------------------- */

typedef struct shmq_message {
	uint64_t word; /* the slot's state word while it is ours */
	uint64_t id;
	int64_t timestamp;
	const void *body;
	uint32_t length;
	uint32_t slot;
	uint32_t attempts;
	uint32_t reserved;
} shmq_message;

/* Registers a session with the queue. msg_timeout_ns: 0 the queue's default, -1 never. */
int shmq_consumer_open(shmq_broker *b, uint32_t queue, uint64_t serial, uint32_t max_in_flight,
                       int64_t msg_timeout_ns, int64_t until, shmq_consumer **out);
/* Returns what it has not finished to the queue, frees the session. The handle stays valid (every
 * call answers SHMQ_CLOSED) until shmq_consumer_free. */
int shmq_consumer_close(shmq_consumer *c, int64_t until);
void shmq_consumer_free(shmq_consumer *c);
/*
 * Take up to n messages: got >= 1 and 0, or SHMQ_EMPTY. Bodies lie in shared memory: copy, then
 * check with shmq_message_held; or pin.
 * death: a message is INFLIGHT of this client (the reaper returns it) or was not taken.
 */
int shmq_take(shmq_consumer *c, shmq_message *out, uint32_t n, int64_t until, uint32_t *got);
/* The same, but no more once their bodies have max_bytes: at least one, whatever its size. */
int shmq_take_bytes(shmq_consumer *c, shmq_message *out, uint32_t n, uint64_t max_bytes,
                    int64_t until, uint32_t *got);
/* From now on at most so many in flight to it; 0: takes nothing. Who waits looks again only when
 * woken (shmq_consumer_wake, shmq_waiter_wake). */
void shmq_consumer_limit(shmq_consumer *c, uint32_t max_in_flight);
/* Is the message still in flight to us, so that what was copied before is its body? */
bool shmq_message_held(shmq_consumer *c, const shmq_message *m);
/* Sleep until there may be something to take, at most to `deadline` and 1 s. As
 * shmq_producer_wait. */
int shmq_consumer_wait(shmq_consumer *c, int64_t deadline);
/* Wake every thread of this process that waits on this consumer, also with a shmq_waiter. */
void shmq_consumer_wake(shmq_consumer *c);
/* Who was told that there may be something to take, and takes nothing, tells the next waiter of the
 * queue, in whatever process. */
void shmq_consumer_pass(shmq_consumer *c);

/* One thread that waits for many consumers with one doorbell. Without a free doorbell it polls. */
typedef struct shmq_waiter shmq_waiter;
int shmq_waiter_open(shmq_broker *b, shmq_waiter **out);
/*
 * Sleep, never spin, until one of the n consumers (of the same broker; the caller keeps them) may
 * have something to take, is closed or gone, or shmq_waiter_wake is called; at most to `deadline`
 * and 1 s. ready: room for n indices, `count` of them are filled in. 0: look again, also at what
 * there is to wait for (count may be 0); SHMQ_TIMEOUT, SHMQ_INTERRUPTED (count is 0). A deadline
 * that is over only looks, which any thread may do at any time; else one thread at a time.
 * Each index returned may be a ring meant for one waiter: take, or shmq_consumer_pass.
 * death: its bits in the queues' waiters, which the reaper takes away, and a ring it had got, for
 * which the reaper rings everybody.
 */
int shmq_waiter_wait(shmq_waiter *w, shmq_consumer *const *consumers, uint32_t n, int64_t deadline,
                     uint32_t *ready, uint32_t *count);
/* End the wait, or the next one if there is none; many calls are as one. */
void shmq_waiter_wake(shmq_waiter *w);
/* Give back its doorbell, which a detach has done already; nobody may be in shmq_waiter_wait. The
 * handle stays valid (every call answers SHMQ_CLOSED or does nothing) until shmq_waiter_free. */
void shmq_waiter_close(shmq_waiter *w);
void shmq_waiter_free(shmq_waiter *w);

/* For each m[i]: ok[i] = 1 and its state changed, or ok[i] = 0 (not in flight to us). Returns 0 if
 * all were, else SHMQ_NOT_IN_FLIGHT. ok may be NULL.
 * death: those whose state word changed are done, the others are not. */
int shmq_finish(shmq_consumer *c, const shmq_message *m, uint32_t n, uint8_t *ok, int64_t until);
/* delay_ns clamped to [0, max_req_timeout]. 0: to the queue at once, behind what is published. */
int shmq_requeue(shmq_consumer *c, const shmq_message *m, uint32_t n, int64_t delay_ns,
                 uint8_t *ok, int64_t until);
/* New deadline: now + msg_timeout, at most delivery + max_msg_timeout. */
int shmq_touch(shmq_consumer *c, const shmq_message *m, uint32_t n, uint8_t *ok, int64_t until);

/* Keep the body in place until shmq_unpin, whatever becomes of the message. SHMQ_NOT_IN_FLIGHT;
 * SHMQ_TABLE_FULL: the client's log is full (copy instead). */
int shmq_pin(shmq_consumer *c, const shmq_message *m, int64_t until);
int shmq_unpin(shmq_consumer *c, const shmq_message *m, int64_t until);

typedef struct shmq_consumer_info {
	uint32_t queue, session, in_flight, max_in_flight;
	uint64_t serial, delivered, finished, requeued, timed_out;
} shmq_consumer_info;
void shmq_consumer_get_info(const shmq_consumer *c, shmq_consumer_info *out);

/* ---- the gateway's wire, many at a time (nsqd's TCP protocol) --------------------------------- */

#define SHMQ_WIRE_ID 16u    /* hex digits of an id */
#define SHMQ_WIRE_FIN 21u   /* a FIN line */
#define SHMQ_WIRE_FRAME 34u /* a message frame without its body */

/* How many of n bodies (int32 BE size, then as many bytes) are whole, and how many bytes they take.
 * bodies: room for n of them, or NULL. SHMQ_INVALID: the next one's size is `bad`, which is not
 * from 1 to max_msg_size; those before it are counted. */
int shmq_wire_bodies(const void *data, uint64_t length, uint64_t max_msg_size, uint32_t n,
                     shmq_body *bodies, uint32_t *whole, uint64_t *used, int64_t *bad);
/* The bodies of up to n whole PUB commands at the start of `data`, all of the same `line`, and how
 * many bytes the commands take. One that is not whole, or whose size is not right, ends them. */
uint32_t shmq_wire_publishes(const void *data, uint64_t length, const void *line,
                             uint64_t line_length, uint64_t max_msg_size, uint32_t n,
                             shmq_body *bodies, uint64_t *used);
/* The bodies of the MPUB command of this `line` at the start of `data`. 0 and no bytes: it is not
 * whole, has more than n of them, or something about it is not right. */
uint32_t shmq_wire_batch(const void *data, uint64_t length, const void *line, uint64_t line_length,
                         uint64_t max_msg_size, uint64_t max_body_size, uint32_t n,
                         shmq_body *bodies, uint64_t *used);
/* An id as 16 lower-case hex digits; false: it is none. */
bool shmq_wire_id(const void *text, uint64_t *id);
/* The ids of up to n FIN lines at the start of `data`, and how many bytes those take. */
uint32_t shmq_wire_finishes(const void *data, uint64_t length, uint64_t *ids, uint32_t n,
                            uint64_t *used);
/* Write the frame of a delivery: SHMQ_WIRE_FRAME + length bytes. */
uint64_t shmq_wire_frame(const shmq_message *m, void *to);

/* The deliveries of one consumer by id, in private memory. One thread at a time. */
typedef struct shmq_window shmq_window;
int shmq_window_open(shmq_window **out);
void shmq_window_free(shmq_window *w);
/* Room for n more; forgets what is no longer in flight to `c`, so it grows with what is. */
int shmq_window_reserve(shmq_window *w, const shmq_consumer *c, uint32_t n);
void shmq_window_add(shmq_window *w, const shmq_message *m);
/* id, word and slot of the delivery; it may have timed out since. */
bool shmq_window_find(const shmq_window *w, uint64_t id, shmq_message *out);
bool shmq_window_remove(shmq_window *w, uint64_t id, shmq_message *out);

/* ---- leases --------------------------------------------------------------------------------- */

/*
 * A lease is a set of messages taken under a name, to be read as often as wanted, in parts, by any
 * process, each time the same rows; then finished at once. A lessee is the name and its present
 * owner: who opens it becomes its next incarnation, and every earlier one is fenced
 * (SHMQ_LEASE_FENCED). Leases go back to the head of the queue, attempts + 1, when the lessee gave no
 * sign of life for `ttl`, or had no owner for `grace`; a death of the owner begins `grace` at once.
 *
 * A lease's state word decides over all its messages; a lessee's leases are numbered upwards.
 */
typedef struct shmq_lessee {
	uint32_t queue, index;
	uint64_t serial, incarnation;
} shmq_lessee;
typedef struct shmq_lease {
	uint64_t id, parent, bytes;
	uint32_t count, parts, replays;
	uint32_t on_disk; /* of `count` */
} shmq_lease;
/* Whole records from the queue's read position on, as its files were found to have them. */
typedef struct shmq_run {
	uint64_t from, to, bytes; /* positions; bytes of bodies */
	uint32_t count, parts;
	const uint64_t *at;       /* position of each part's first record */
} shmq_run;

/* ttl, grace: ns; 0: never. SHMQ_TABLE_FULL: 64 names hold leases or are somebody's. */
int shmq_lessee_open(shmq_broker *b, uint32_t queue, uint64_t serial, const char *name,
                     int64_t ttl_ns, int64_t grace_ns, int64_t until, shmq_lessee *out);
/* A sign of life. */
int shmq_lessee_touch(shmq_broker *b, const shmq_lessee *l, int64_t until);
/* Nobody's from now on; its leases wait for `grace`. */
int shmq_lessee_close(shmq_broker *b, const shmq_lessee *l, int64_t until);
/*
 * Up to n messages of together max_bytes (at least one), in the order a take would hand them out, in
 * `parts` (1 to 32) parts. SHMQ_EMPTY: nothing there, or as much is held as may be.
 * SHMQ_TABLE_FULL: 64 leases of this queue are open.
 *
 * `run`, if any: what lies on disk behind what is in memory, in its parts; the lease has all of it or,
 * if it would be too much or out of turn, nothing. It stays on disk, is read there, and nothing else
 * is read back into memory until the lease ends; one lease of a queue at a time has one.
 * SHMQ_EMPTY, too, if the read position is not where the run begins: nothing was taken.
 * death: all of them are in the lease, or all are where they were.
 */
int shmq_lease_take(shmq_broker *b, const shmq_lessee *l, uint64_t parent, uint32_t n,
                    uint64_t max_bytes, uint32_t parts, const shmq_run *run, int64_t until,
                    shmq_lease *out);
/* The lease, again: SHMQ_LEASE_LOST. `replay`: counted as one more reading. */
int shmq_lease_look(shmq_broker *b, const shmq_lessee *l, uint64_t id, bool replay, int64_t until,
                    shmq_lease *out);
/* The lessee's open leases, in order; n: capacity. */
int shmq_lease_list(shmq_broker *b, const shmq_lessee *l, shmq_lease *out, uint32_t n,
                    int64_t until, uint32_t *count);
/* Finish every lease up to `through`. SHMQ_LEASE_LOST: that one is neither held nor was it finished;
 * those before it are finished. death: each is finished or not. */
int shmq_lease_finish(shmq_broker *b, const shmq_lessee *l, uint64_t through, int64_t until,
                      uint64_t *messages);
/* Give one back. */
int shmq_lease_return(shmq_broker *b, const shmq_lessee *l, uint64_t id, int64_t until,
                      uint64_t *messages);
/* An administrator ends anybody's: back to the queue, or finished. */
int shmq_lease_end(shmq_broker *b, uint32_t queue, uint64_t serial, uint64_t id, bool back,
                   int64_t until, uint64_t *messages);
/*
 * Reading takes no lock. A cursor stands before a part's first message; measure says how many of the
 * next messages (at most `rows`, and not more than `bytes` of bodies but for a single one) come next;
 * copy writes them out and moves the cursor on. SHMQ_LEASE_LOST: it was ended meanwhile; nothing of
 * what was written may be used.
 */
typedef struct shmq_lease_cursor {
	uint32_t queue, part, slot, left;
	uint64_t serial, id;
	uint64_t from, to; /* the part's records on disk, to be read behind what is in memory */
} shmq_lease_cursor;
int shmq_lease_open(shmq_broker *b, uint32_t queue, uint64_t serial, uint64_t id, uint32_t part,
                    shmq_lease_cursor *out);
int shmq_lease_measure(shmq_broker *b, const shmq_lease_cursor *c, uint32_t rows, uint64_t bytes,
                       uint32_t *count, uint64_t *size);
/* ids, timestamps (ns), attempts: count of each; offsets: count + 1; data: `size` bytes. */
int shmq_lease_copy(shmq_broker *b, shmq_lease_cursor *c, uint32_t count, uint64_t size,
                    uint64_t *ids, int64_t *timestamps, int32_t *attempts, int32_t *offsets,
                    uint8_t *data);
/* Sleep until there may be something to lease, at most to `deadline` and 1 s; as
 * shmq_consumer_wait. */
int shmq_lease_wait(shmq_broker *b, const shmq_lessee *l, int64_t deadline);

/* ---- supervisor ----------------------------------------------------------------------------- */

/* This client is the supervisor: pid, start time, epoch, doorbell into the header. */
int shmq_supervise(shmq_broker *b, const shmq_limits *limits, int64_t until);
/* Where its files are, absolute, for who reads what a lease holds on disk. */
int shmq_data_path_set(shmq_broker *b, const char *path);
/* The data path refuses to be written, with this errno; 0: it does not (any more). */
void shmq_disk_trouble_set(shmq_broker *b, int error);
/* That errno, 0 if there is none or no supervisor that would know; `path`: which directory it is, ""
 * if it is not known. */
#define SHMQ_PATH_MOST 1024
int shmq_disk_trouble(shmq_broker *b, char path[SHMQ_PATH_MOST]);
/* Sleep on the supervisor's doorbell; `why`: bits 1 request, 2 work for the spiller, 4 a client left,
 * 8 topics, channels or pauses changed, 16 something times out or is due before the scanner knows.
 * Stores the heartbeat. */
int shmq_supervisor_wait(shmq_broker *b, int64_t deadline, uint32_t *why);
/* Who has work for the spiller (overflow, refill, deferred messages, a backlog to move) notes the
 * queue and rings 2: so that it need not look at all of them. Here the supervisor does it itself. */
void shmq_attend(shmq_broker *b, uint32_t queue);
/* The scanner sleeps until then: who makes a queue's next deadline or due time earlier rings 16. Look
 * at the columns after this. */
void shmq_scan_at(shmq_broker *b, int64_t deadline, int64_t due);
/* How many queues were noted since the last call; room for n >= 64 indices, what does not fit is
 * left for the next. */
uint32_t shmq_attention(shmq_broker *b, uint32_t *queues, uint32_t n);
/* nsqd.dat is about to be replaced: its times of modification (ns), before and then. */
void shmq_names_written(shmq_broker *b, uint64_t replaced, uint64_t written);
void shmq_supervisor_stopping(shmq_broker *b); /* no attach, no request from now on */
/* Mark the directory closed (last act before its unlinking): every handle answers SHMQ_GONE. */
void shmq_directory_close(shmq_broker *b);

typedef struct shmq_request {
	uint32_t ticket, kind, client;
	char topic[80], channel[80];
} shmq_request;
/* The next posted request, or SHMQ_EMPTY. Abandoned ones are freed on the way. */
int shmq_request_next(shmq_broker *b, int64_t until, shmq_request *out);
void shmq_request_answer(shmq_broker *b, uint32_t ticket, int status);

/* Enter a topic (its id clock above `clock_floor`, 64 ns units). Existing: its index, 0. */
int shmq_topic_create(shmq_broker *b, const char *name, uint64_t clock_floor, int64_t until,
                      uint32_t *topic, uint32_t *generation);
/* A free queue index and a new serial for the segment's name. */
int shmq_queue_reserve(shmq_broker *b, int64_t until, uint32_t *queue, uint64_t *serial);
/* Size, reserve and fill a new queue segment behind `fd`. As shmq_directory_create. */
int shmq_queue_create(shmq_broker *b, int fd, uint32_t queue, uint64_t serial, uint32_t topic,
                      const char *base, uint64_t disk_read, uint64_t disk_write,
                      uint64_t disk_depth, bool ephemeral, bool paused);
/* Enter it in the directory: channel NULL for a backlog. One store makes it visible. */
int shmq_queue_enter(shmq_broker *b, uint32_t queue, uint64_t serial, uint32_t topic,
                     const char *channel, int64_t until);
/* The topic's backlog becomes its first channel, with all it holds. SHMQ_GONE: no backlog;
 * SHMQ_INVALID: the topic is paused or has a channel. `base_pending` is set: rename its files, then
 * call shmq_queue_renamed. */
int shmq_queue_take_over(shmq_broker *b, uint32_t topic, const char *channel, int64_t until,
                         uint32_t *queue, uint64_t *serial);
int shmq_queue_renamed(shmq_broker *b, uint32_t queue, const char *base, int64_t until);
/* Out of the directory, segment CLOSED, everybody woken (SHMQ_GONE). Then unlink its name.
 * was_closed: a removal that died has closed it already, so it cannot be mapped any more.
 * death: the entry is DELETING; call it again. */
int shmq_queue_remove(shmq_broker *b, uint32_t queue, uint64_t serial, bool was_closed,
                      int64_t until);
/* The same, unless it has a consumer: looked at under D, so that whoever opens one meanwhile finds
 * the queue gone or keeps it. *removed false: it has one, or D is held just now. */
int shmq_queue_remove_idle(shmq_broker *b, uint32_t queue, uint64_t serial, int64_t until,
                           bool *removed);
int shmq_topic_remove(shmq_broker *b, uint32_t topic, uint32_t generation, int64_t until);

/* Give the pages behind the last body in use back to the system; how many bytes the arena is smaller
 * then. For a queue that has been nearly empty for a while: it grows again as it did at first.
 * death: the arena is as large as before, or smaller and its pages are given back next time. */
int shmq_give_back(shmq_broker *b, uint32_t queue, int64_t until, uint64_t *bytes);

/* One bite of nsqd's scan: at most `limit` expired and due messages to the requeue ring. Corrects
 * the queue's next_deadline and next_due columns. */
int shmq_expire(shmq_broker *b, uint32_t queue, int64_t now, int64_t realtime, uint32_t limit,
                int64_t until, uint32_t *expired, uint32_t *due);

/* Overflow. Move the oldest n READY to the requeue ring, unread (design 8). */
int shmq_advance(shmq_broker *b, uint32_t queue, uint32_t n, int64_t until, uint32_t *moved);
/*
 * Spill: begin marks up to n READY slots (at most max_bytes of records) SPILLING and reports their
 * record lengths (4 + 26 + body); the caller gives each its disk position; encode writes the records
 * one after the other into `buffer`; end stores the write position and frees the slots, or, with
 * ok = false or if a slot is no longer SPILLING (emptied: SHMQ_GONE), gives them back.
 * death: positions below the stored write position are on disk, the others still in memory
 * (adoption makes them what they were).
 *
 * ALL: for a flush. In flight, the requeue ring, the ready ring; not what is deferred (chunks).
 * AHEAD: for a flush while something is on disk: what is in flight and in the requeue ring, to go
 * right in front of the read position, where everything has been read: its first record to
 * `position`, in this file or (nothing of it is read yet) at the start of the file before, of which
 * it will be all. end stores that as the read position (write_position is not looked at). All of it,
 * or the youngest part if that fills this file up to its start and there is a file before;
 * SHMQ_FULL if neither fits, SHMQ_EMPTY if nothing is on disk. max_bytes is not looked at.
 * death: records at or behind the stored read position are on disk, the others still in memory.
 *
 * RETURNED: the youngest of what came back to the requeue ring and waits for others anyway (timed out,
 * due, requeued), to make room for what is deferred; written as READY is. What must not come after it
 * is spilled before.
 * FRONT: the others at that ring's end, for the same; written as AHEAD is, or as much of them as fits
 * there, also if nothing is on disk. Nothing is taken from clients: what is in flight stays there, and
 * while a lease reaches on to the disk there is nothing to do. SHMQ_EMPTY if nothing can be moved.
 * OUT: as RETURNED, also those that wait for nobody but were handed out before, if FRONT does not fit.
 */
enum shmq_spill_from {
	SHMQ_SPILL_READY = 0,
	SHMQ_SPILL_ALL = 1,
	SHMQ_SPILL_AHEAD = 2,
	SHMQ_SPILL_CHUNK = 3, /* shmq_chunk_begin */
	SHMQ_SPILL_RETURNED = 4,
	SHMQ_SPILL_FRONT = 5,
	SHMQ_SPILL_OUT = 6
};
typedef struct shmq_spill {
	uint32_t queue, count;
	uint64_t bytes;      /* of all records */
	uint32_t *slots;     /* caller's arrays, n entries each */
	uint32_t *lengths;   /* record lengths */
	uint64_t *positions; /* READY, ALL, RETURNED, OUT: filled by the caller before end; CHUNK: by begin, due times */
	enum shmq_spill_from from;
	uint64_t position;   /* AHEAD, FRONT: of the first record; CHUNK: its number */
} shmq_spill;
int shmq_spill_begin(shmq_broker *b, uint32_t queue, enum shmq_spill_from from, uint32_t n,
                     uint64_t max_bytes, int64_t until, shmq_spill *out);
int shmq_spill_encode(shmq_broker *b, const shmq_spill *s, void *buffer);
int shmq_spill_end(shmq_broker *b, const shmq_spill *s, uint64_t write_position, bool ok,
                   int64_t until);
/* Whole records and nothing else, `count` of them, to columns as shmq_lease_copy has them: `attempts`
 * with the delivery that this is; data: length - 30 * count bytes. SHMQ_CORRUPT. */
int shmq_records_decode(const void *records, uint64_t length, uint32_t count, uint64_t *ids,
                        int64_t *timestamps, int32_t *attempts, int32_t *offsets, uint8_t *data);
/* How many whole records lie in `data`, up to `most`, how many bytes they take; damaged:
 * the next one cannot be right (its length is impossible). */
int shmq_records_scan(const void *data, uint64_t length, uint64_t max_msg_size, uint32_t most,
                      uint32_t *records, uint64_t *used, bool *damaged);
/*
 * Restore records read from disk at `position` into the requeue ring; as many as fit: `taken` of
 * them, `used` bytes. next_position is stored as the read position when all were taken (it may be
 * in the next file), else position + used. SHMQ_GONE if the read position is no longer `position`
 * (emptied). death: RESTORED(pos) below the read position are BACK, the others FREE.
 */
int shmq_restore(shmq_broker *b, uint32_t queue, const void *data, uint64_t length,
                 uint64_t position, uint64_t next_position, int64_t until, uint32_t *taken,
                 uint64_t *used);
/* The read position jumps over damage or to the next file, if it still is `from`; `depth` as
 * recounted. */
int shmq_disk_set(shmq_broker *b, uint32_t queue, uint64_t from, uint64_t read_position,
                  uint64_t depth, int64_t until);
/* Adoption where another broker has had the files since: on disk is what is between these positions,
 * and every chunk up to `chunk` counts. What is in memory stays, but no longer has a place there. */
int shmq_disk_adopt(shmq_broker *b, uint32_t queue, uint64_t read_position, uint64_t write_position,
                    uint64_t depth, uint64_t chunk, int64_t until);
/* What was read ahead from the current read file and never delivered goes back to disk by lowering
 * the read position: for a flush, and where a publisher needs its room. */
int shmq_unrestore(shmq_broker *b, uint32_t queue, int64_t until, uint32_t *count);

/*
 * Chunks: deferred messages that wait on disk, with their due times (CLOCK_REALTIME ns). A chunk has
 * a number that was never used in this queue, and at most 2^24 messages.
 *
 * Out: begin marks up to n DEFERRED slots that are due at `from_due` or later SPILLING, by due time;
 * encode as for a spill; the caller writes the whole chunk; shmq_spill_end stores its number as
 * deferred_write and frees the slots (or gives them back).
 * death: they are on disk if the number is not above deferred_write, else still in memory.
 */
int shmq_chunk_begin(shmq_broker *b, uint32_t queue, uint64_t chunk, int64_t from_due, uint32_t n,
                     uint64_t max_bytes, int64_t until, shmq_spill *out);
/*
 * In: the next n messages of a chunk, records as on disk and their due times; position: chunk << 24 |
 * number of the first in it. As many as fit: `taken`, and deferred_read is then position + taken.
 * SHMQ_GONE if the chunk was emptied. The caller must have made it certain that what deferred_read
 * says of another chunk is known from its files. death: messages before deferred_read of its chunk
 * are DEFERRED in memory, the others still on disk.
 */
int shmq_chunk_load(shmq_broker *b, uint32_t queue, const void *data, uint64_t length,
                    const int64_t *dues, uint32_t n, uint64_t position, int64_t until,
                    uint32_t *taken);
/* How many messages there are in chunks, recounted. */
int shmq_chunk_depth(shmq_broker *b, uint32_t queue, uint64_t depth, int64_t until);
/* A new segment begins with chunks: the highest number, how many messages. Before its queue is
 * entered. */
int shmq_chunk_start(int fd, uint64_t highest, uint64_t depth);

/* Move up to n messages of an unpaused topic's backlog to its channels. SHMQ_EMPTY: nothing left;
 * SHMQ_FULL: a channel lacks room. */
int shmq_pump(shmq_broker *b, uint32_t topic, uint32_t generation, uint32_t n, int64_t until,
              uint32_t *moved);

/* A new supervisor's first act for each queue: resolves what the dead one left, rebuilds. */
int shmq_adopt(shmq_broker *b, uint32_t queue, int64_t until);
/* Throw away and rebuild what is derived (under P and D). */
int shmq_rebuild(shmq_broker *b, uint32_t queue, int64_t until);
/* Is every slot in a ring, a heap or a hand? If not (something has overwritten what is derived, and
 * nobody has stumbled over it) rebuild. Looks at a few words only; SHMQ_CORRUPT as all others. */
int shmq_audit(shmq_broker *b, uint32_t queue, int64_t until, bool *repaired);

/* Reaper. Try every life lock: indices of clients whose thread or process ended (n: capacity). */
typedef struct shmq_dead {
	uint32_t client, generation;
	int32_t pid;
	uint32_t reserved;
	uint64_t start_time, program;
} shmq_dead;
int shmq_reap_scan(shmq_broker *b, shmq_dead *out, uint32_t n, uint32_t *found);
/* The same every `every` ns until there are some, `fd` (-1: none) becomes readable, a signal comes or
 * `until`; less often while nobody is attached. */
int shmq_reap_wait(shmq_broker *b, int fd, int64_t every, int64_t until, shmq_dead *out, uint32_t n,
                   uint32_t *found);
/* Only the thread ended: let the entry live on, watched by its pid. */
void shmq_reap_spare(shmq_broker *b, uint32_t client, uint32_t generation);
/* Give back everything a dead client held, LAST free its entry. */
int shmq_reap(shmq_broker *b, uint32_t client, uint32_t generation, int64_t until,
              uint32_t *returned);

#ifdef SHMQ_KILLPOINTS
/* Arm: SIGKILL at the `count`-th passing of the named point (1: the first). NULL disarms. */
void shmq_killpoint_arm(const char *name, uint32_t count);
#endif

#ifdef __cplusplus
}
#endif
#endif
