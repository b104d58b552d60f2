/*
 * shmq: the contract of the core for clients: attach, publish, take, lease.
 *
 * shmq_supervisor.h has the supervisor's calls, shmq_wire.h nsqd's TCP protocol. Nothing here knows
 * Python, names of shared memory, or files.
 *
 * A process maps the directory (shmq_broker_open), takes a client entry (shmq_broker_attach), and
 * then publishes through producers and takes through consumers.
 *
 * Results. A function of type int returns 0 or a negative status from the table below; the comment
 * at the function lists the statuses that need the caller's attention. Besides those any call may
 * return SHMQ_AGAIN, SHMQ_NEED_MAP, SHMQ_FORKED, SHMQ_CLOSED, SHMQ_GONE (the topic, queue or broker
 * was deleted), SHMQ_NO_MEMORY and SHMQ_CORRUPT. Outputs go through pointers and are untouched on
 * failure unless a comment says otherwise. While a call holds a lock it makes no Python object,
 * does not touch a disk and does not log. No call aborts.
 *
 * Arguments. b: the attachment. topic, queue: an index in the directory; `generation` (of a topic)
 * and `serial` (of a queue) tell it from others that had the index before. n: the number of entries
 * that an array of the caller has, or that it passes. Names and bases are NUL-terminated. Durations
 * and times are nanoseconds, sizes and lengths bytes.
 *
 * Time. `until` is an absolute CLOCK_MONOTONIC time in nanoseconds. A call waits for LOCKS up to
 * that time. With 0 it only tries, and returns SHMQ_AGAIN if another thread holds a lock; nothing
 * was done then, so call it again. Only the ..._wait functions and shmq_request_wait wait for
 * anything else.
 *
 * Mapping. The core knows no names of segments. An operation that meets a queue which this process
 * has not mapped returns SHMQ_NEED_MAP, and nothing was done. shmq_broker_missing tells which queue
 * it was; the caller opens the segment, calls shmq_broker_map, and tries again.
 *
 * Death. A process may die at any instruction of any call. The next process that takes the lock
 * repairs the shared state (EOWNERDEAD -> dirty -> rebuild under the publish lock P and the deliver
 * lock D). The reaper gives back everything that a dead client held. "death:" at a call tells what
 * the call may leave, and which commit word decides.
 *
 * Fork. After fork() every handle answers SHMQ_FORKED in the child; the child attaches again.
 *
 * Threads. Any thread may use any handle. Do not close a handle while another thread uses it.
 */
#ifndef SHMQ_H
#define SHMQ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, value, Python exception or "", sentence) */
#define SHMQ_STATUS_TABLE(X)                                                                       \
	X(OK, 0, "", "done")                                                                           \
	X(AGAIN, -1, "Busy", "a lock is held by another thread")                                       \
	X(NEED_MAP, -2, "", "a queue must be mapped first")                                            \
	X(NEED_BACKLOG, -3, "NeedBacklog", "the topic needs a backlog queue")                          \
	X(EMPTY, -4, "", "nothing to take")                                                            \
	X(FORKED, -5, "Forked", "this handle belongs to the parent process")                           \
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
	X(INVALID, -16, "BadArgument", "an argument is out of range")                                  \
	X(CLOSED, -17, "Gone", "the handle was closed")                                                \
	X(TIMEOUT, -18, "", "the time is over")                                                        \
	X(INTERRUPTED, -19, "", "a signal came")                                                       \
	X(TABLE_FULL, -20, "ShmqError", "a table is full")                                             \
	X(CORRUPT, -21, "LayoutMismatch", "the segment's contents cannot be right")                    \
	X(LEASE_LOST, -22, "LeaseLost", "the lease is not held any more")                              \
	X(LEASE_FENCED, -23, "LeaseFenced", "somebody else leases under this name now")                \
	X(REPEATED, -24, "", "these messages were published before")                                   \
	X(NOT_READY, -25, "NotReady", "the segment is not ready")                                      \
	X(REJECTED, -26, "Rejected", "a channel has reached its limit and rejects (overflow=reject)")  \
	X(STORE_FULL, -27, "Full", "the results store has as many keys or bytes as it may")            \
	X(NO_NUMBER, -28, "BadArgument", "the value is no whole number of 64 bits")                    \
	X(OVERTAKEN, -29, "", "somebody else has changed it meanwhile")                                \
	X(FOREIGN, -30, "OtherNamespace", "the PID namespace is not the broker's")                     \
	X(REFUSED, -31, "ShmqError", "the supervisor refused it")                                      \
	X(NOT_SEALED, -32, "NotSealed",                                                                \
	  "the topic is that of a pool or a queue, which alone may put there")

enum shmq_status {
#define X(name, value, exception, sentence) SHMQ_##name = value,
	SHMQ_STATUS_TABLE(X)
#undef X
};
/* The name of a status ("FULL"), and its sentence. Never NULL. */
const char *shmq_status_name(int status);
const char *shmq_status_sentence(int status);
/* The details of this thread's last failed call as a sentence; "" if there are none. */
const char *shmq_error_detail(void);

/* Bytes of an instance's key: 16 for the seals of messages, 16 for those of results. */
#define SHMQ_SEAL_KEY 32

typedef struct shmq_broker shmq_broker;
typedef struct shmq_producer shmq_producer;
typedef struct shmq_consumer shmq_consumer;

/* The options that the data path itself needs. Times in ns, sizes in bytes, counts in messages. */
typedef struct shmq_limits {
	int64_t msg_timeout_ns, max_msg_timeout_ns, max_req_timeout_ns;
	uint64_t max_msg_size;
	uint64_t arena_size;
	uint32_t node_id, mem_queue_size, in_flight_slots;
} shmq_limits;

int64_t shmq_now(void);      /* CLOCK_MONOTONIC, ns */
int64_t shmq_realtime(void); /* CLOCK_REALTIME, ns */
/* The number of forks between the first process and this one. */
uint32_t shmq_fork_generation(void);

/* Returns true if the name is 1 to 64 bytes of [.a-zA-Z0-9_-], optionally with "#ephemeral" at
 * the end (which counts). */
bool shmq_name_valid(const char *name, size_t length);
/* Returns true if the name ends in "#ephemeral". */
bool shmq_name_ephemeral(const char *name, size_t length);

/* ---- layout table, for numpy ---------------------------------------------------------------- */

typedef struct shmq_field {
	const char *structure, *name;
	const char *dtype; /* numpy: "<u8", "<i4", "S80", "V40" or the name of another structure */
	uint32_t offset, size, count;
} shmq_field;
/* Every field of every structure in shared memory, in a static table of `count` entries. */
const shmq_field *shmq_layout(size_t *count);
/* The size of a structure in bytes; 0 if there is none of this name. */
uint32_t shmq_layout_size(const char *structure);
/* A hash of everything that two builds must agree on to share a segment. */
uint64_t shmq_layout_fingerprint(void);
uint32_t shmq_layout_version(void);
typedef struct shmq_constant {
	const char *name; /* without SHMQ_ */
	int64_t value;
} shmq_constant;
/* States, table sizes and kinds by name, in a static table of `count` entries. */
const shmq_constant *shmq_constants(size_t *count);

/* ---- attachment ----------------------------------------------------------------------------- */

enum shmq_kind { SHMQ_AS_CLIENT = 0, SHMQ_AS_SUPERVISOR = 1, SHMQ_AS_GATEWAY = 2 };

/* Map and check the directory that `fd` refers to; `fd` may be closed afterwards. SHMQ_LAYOUT
 * (shmq_error_detail has the details), SHMQ_NO_MEMORY; SHMQ_NOT_READY: its creator is at work, or
 * died and the next supervisor replaces it. */
int shmq_broker_open(int fd, shmq_broker **out);
/* Take a client entry and its `life` lock, which the calling thread holds from then on. Does
 * nothing if the broker is attached. SHMQ_TOO_MANY_CLIENTS, SHMQ_NOT_RUNNING (the broker is
 * stopping).
 * death: the entry is still FREE, or it is LIVE with a `life` lock that nobody holds, and the
 * reaper frees it. */
int shmq_broker_attach(shmq_broker *b, enum shmq_kind kind, int64_t until);
/* Give back everything that the client holds, then its entry. After a failure call it again. */
int shmq_broker_detach(shmq_broker *b, int64_t until);
/* Free the handle; the mapping goes with the last handle that uses it. In a forked child the entry
 * stays the parent's. */
void shmq_broker_close(shmq_broker *b);
/* Returns true in a child that was forked after shmq_broker_attach. */
bool shmq_broker_forked(const shmq_broker *b);
/* Index of the client's entry. */
uint32_t shmq_broker_client(const shmq_broker *b);
/* The queue that caused this thread's last SHMQ_NEED_MAP. */
void shmq_broker_missing(const shmq_broker *b, uint32_t *queue, uint64_t *serial);
/* Map the segment that `fd` refers to as this queue; `fd` may be closed afterwards. SHMQ_LAYOUT,
 * SHMQ_CORRUPT, SHMQ_NO_MEMORY, SHMQ_GONE. */
int shmq_broker_map(shmq_broker *b, uint32_t queue, uint64_t serial, int fd);
/* Drop the mapping of a queue that is gone. It is unmapped when no handle uses it. */
void shmq_broker_unmap(shmq_broker *b, uint32_t queue, uint64_t serial);
/* Address and length in bytes of a queue's mapped segment (queue SHMQ_AS_DIRECTORY: of the
 * directory), for read-only views. Takes a reference on the mapping; give it back with
 * shmq_segment_release. */
#define SHMQ_AS_DIRECTORY UINT32_MAX
int shmq_segment_view(shmq_broker *b, uint32_t queue, const void **base, uint64_t *length,
                      void **reference);
void shmq_segment_release(void *reference);
/* Ensure that [at, at + bytes) of a mapped segment is backed by pages; allocates them if necessary.
 * Returns false if it is not backed: reading the range would then raise SIGBUS. Returns true for
 * memory that is not a mapping. */
bool shmq_segment_has_pages(const void *base, uint64_t at, uint64_t bytes);
/* Returns true if the instance was stopped in an orderly way, or is being stopped. */
bool shmq_broker_stopped(const shmq_broker *b);
/* Returns the errno with which the data path refuses writes; 0 if it accepts them, or if no
 * supervisor lives that would know. path: the directory, or "" if it is not known. */
#define SHMQ_PATH_MOST 1024
int shmq_disk_trouble(shmq_broker *b, char path[SHMQ_PATH_MOST]);
/* Returns true if a live supervisor holds its `life` lock. This is exact at once, also after a
 * kill -9. */
bool shmq_supervisor_alive(shmq_broker *b);

/* ---- registry ------------------------------------------------------------------------------- */

/* Find the topic of this name. SHMQ_GONE: there is none. */
int shmq_topic_find(shmq_broker *b, const char *name, uint32_t *topic, uint32_t *generation);
/* Find the queue of a topic's channel; channel NULL: of its backlog. SHMQ_GONE: there is none. */
int shmq_queue_find(shmq_broker *b, uint32_t topic, const char *channel, uint32_t *queue,
                    uint64_t *serial);

/* Requests to the supervisor, which alone creates and deletes: post one, wait for its answer (in as
 * many calls as you like), end it. */
enum shmq_request_kind {
	SHMQ_CREATE_TOPIC = 1,
	SHMQ_CREATE_CHANNEL = 2,
	SHMQ_CREATE_BACKLOG = 3,
	SHMQ_DELETE_TOPIC = 4,
	SHMQ_DELETE_CHANNEL = 5,
	SHMQ_CREATE_STORE = 6, /* only by shmq_store_request; topic: the store's name */
	SHMQ_DELETE_STORE = 7, /* topic: the store's name */
	SHMQ_JOIN_CHANNEL = 8  /* create the channel, but not its topic */
};
/* Post a request. channel: NULL or "" if the request has none. ticket: for the calls below.
 * SHMQ_BAD_NAME, SHMQ_NOT_RUNNING (the broker is stopping); SHMQ_AGAIN, too, if all entries are
 * taken. */
int shmq_request_post(shmq_broker *b, enum shmq_request_kind kind, const char *topic,
                      const char *channel, int64_t until, uint32_t *ticket);
/* Wait for the answer up to `deadline` (CLOCK_MONOTONIC ns). Returns the supervisor's status;
 * SHMQ_TIMEOUT, SHMQ_INTERRUPTED; SHMQ_NOT_RUNNING: the supervisor is dead. */
int shmq_request_wait(shmq_broker *b, uint32_t ticket, int64_t deadline);
/* Give the ticket back, whether the request was answered or not. */
void shmq_request_end(shmq_broker *b, uint32_t ticket);

/* Pause or unpause a topic or a channel. death: it is paused or it is not. */
int shmq_topic_pause(shmq_broker *b, uint32_t topic, uint32_t generation, bool paused,
                     int64_t until);
int shmq_channel_pause(shmq_broker *b, uint32_t queue, uint64_t serial, bool paused, int64_t until);

/* ---- policies ------------------------------------------------------------------------------- */

/* The effect of a publish to a queue that has reached a limit. */
enum shmq_overflow {
	SHMQ_OVERFLOW_DISK = 0,  /* no limit but memory: the supervisor writes messages to disk */
	SHMQ_OVERFLOW_BLOCK = 1, /* SHMQ_FULL, and the publisher waits; nothing goes to disk */
	SHMQ_OVERFLOW_REJECT = 2,
	SHMQ_OVERFLOW_DROP_OLDEST = 3, /* the oldest READY messages make room */
	SHMQ_OVERFLOW_DROP_NEWEST = 4  /* this queue does not get the message */
};

enum shmq_setting_flag {
	SHMQ_EXPIRED_TO_DEAD = 1,  /* expired messages go to the dead topic */
	SHMQ_OVERFLOW_TO_DEAD = 2, /* so do those that DROP_OLDEST drops */
	SHMQ_SEALED_ONLY =
			4 /* of a topic: only sealed producers may publish; else SHMQ_NOT_SEALED. Of its channels:
	                       if one has it, only those get messages */
};

/* The policies of a queue. All zeros: nsqd's rules and no others. */
typedef struct shmq_settings {
	uint64_t max_messages; /* waiting, in memory and on disk; 0: no limit */
	uint64_t max_bytes;    /* of their bodies; 0: no limit */
	int64_t message_ttl;   /* a message older than this is not delivered; 0: no limit */
	int64_t retry_first;   /* before a failed message is delivered again; 0: at once */
	int64_t retry_most;    /* the delay doubles with each failure up to this */
	uint32_t max_attempts; /* failures after which a message is dead, to 65535; 0: no limit */
	uint32_t overflow;     /* enum shmq_overflow */
	uint32_t flags;        /* enum shmq_setting_flag */
	char dead_letter[80];  /* name of the dead topic; empty: <topic>.<channel>.dead */
} shmq_settings;

/* Set the policies of a queue; they hold for every later call, and messages that wait stay. was: the
 * settings that the new ones were made from; if others hold by now, the call stores nothing and
 * returns SHMQ_OVERTAKEN. NULL: whatever holds. SHMQ_INVALID (shmq_error_detail says which setting),
 * SHMQ_BAD_NAME. Waiting publishers and consumers look again. death: the old or the new settings
 * hold, as a whole. */
int shmq_queue_configure(shmq_broker *b, uint32_t queue, uint64_t serial, const shmq_settings *was,
                         const shmq_settings *settings, int64_t until);
/* Read them. death: nothing is stored. */
int shmq_queue_settings(shmq_broker *b, uint32_t queue, uint64_t serial, int64_t until,
                        shmq_settings *out);

/* The name of the topic to which the dead letters of a channel go. name: 80 bytes. SHMQ_BAD_NAME: the
 * default is too long, or has a character that no name may have. SHMQ_INVALID: the queue is a
 * backlog. */
int shmq_dead_topic(shmq_broker *b, uint32_t queue, uint64_t serial, int64_t until, char *name);
/* As shmq_queue_configure for a topic's backlog and for the queues that the topic gets later; the
 * channels that it has keep theirs. was: of the topic. death: the old or the new settings hold, as a
 * whole, of the topic and of the backlog; those of the backlog are stored first. */
int shmq_topic_configure(shmq_broker *b, uint32_t topic, uint32_t generation,
                         const shmq_settings *was, const shmq_settings *settings, int64_t until);
/* Read them. death: nothing is stored. */
int shmq_topic_settings(shmq_broker *b, uint32_t topic, uint32_t generation, int64_t until,
                        shmq_settings *out);

/* Drop the READY, REQUEUED, IN_FLIGHT, DEFERRED and SPILLING messages of the queue and its messages
 * on disk (nsqd's "empty"), but not those that are leased. dropped: their number. Chunk files up to
 * the queue's `deferred_gone` may be deleted afterwards.
 * death: some are dropped and some are not; no message is half dropped. */
int shmq_queue_empty(shmq_broker *b, uint32_t queue, uint64_t serial, int64_t until,
                     uint64_t *dropped);

/* ---- properties ----------------------------------------------------------------------------- */

/*
 * A message may carry properties: names with values, beside its body. They travel as one block of
 * entries, back to back: u8 length of the name, the name, u16 little-endian length of the value, the
 * value. These functions read and write only the memory that they are given.
 */
#define SHMQ_PROPERTIES_MOST 4096u /* bytes of a block */
#define SHMQ_PROPERTY_NAME 64u     /* characters of a name, of a-z 0-9 . _ - */
typedef struct shmq_property {
	const char *name; /* not terminated */
	const void *value;
	uint32_t name_length, length;
} shmq_property;
/* Read the entry of a block at `*at`, and move `*at` behind it. `out` points into the block. Returns
 * 1; 0 at the block's end; -1 if there is no whole entry with a name: something has overwritten the
 * block. */
int shmq_property_next(const void *block, uint64_t length, uint64_t *at, shmq_property *out);
/* Append an entry to a block, which has room for SHMQ_PROPERTIES_MOST bytes. SHMQ_INVALID: the name
 * is no name, or begins with "shmq-", as shmq's own entries on disk do. SHMQ_TOO_BIG: the block would
 * be too long. shmq_error_detail has the sentence. */
int shmq_property_add(void *block, uint64_t *length, const shmq_property *p);
/* Returns 0 if the block may be published; statuses as shmq_property_add. */
int shmq_properties_check(const void *block, uint64_t length);

/* ---- publish -------------------------------------------------------------------------------- */

typedef struct shmq_body {
	const void *data;
	uint64_t length;
} shmq_body;

/* Make a producer for a topic, and free it. The topic itself is looked at by each publish. */
int shmq_producer_open(shmq_broker *b, uint32_t topic, uint32_t generation, shmq_producer **out);
void shmq_producer_close(shmq_producer *p);
/* Have everything that the producer publishes from now on carry the seal, which says that a process
 * which may attach has published it, for readers that unpickle. Nobody calls this for a client on the
 * other side of a network. Nothing is stored. */
void shmq_producer_seal(shmq_producer *p);
/*
 * Publish n bodies to every channel of the topic, all or nothing.
 *
 * due: 0, or the CLOCK_REALTIME time (ns) before which they are not delivered, at most
 * max_req_timeout from now. first_id: the id of the first message; message k, counted from 0, has
 * first_id + k * 1024. Bodies of SHMQ_LARGE bytes or more are copied outside the lock, as loans.
 * SHMQ_FULL: a queue lacks room; shmq_producer_wait waits for it. SHMQ_TOO_BIG: the batch can never
 * fit. SHMQ_NEED_BACKLOG: request a backlog queue from the supervisor. SHMQ_INVALID: no message, an
 * empty body, or `due` too late.
 * death: before topic.committed is stored, no channel has any of them; after it, all have all.
 */
int shmq_publish(shmq_producer *p, const shmq_body *bodies, uint32_t n, int64_t due, int64_t until,
                 uint64_t *first_id);
#ifndef SHMQ_LARGE
#define SHMQ_LARGE 65536u
#endif

/* The terms of a publish that not every publish has; zeros: it has none of them. */
typedef struct shmq_terms {
	int64_t due; /* as shmq_publish */
	/* The CLOCK_REALTIME time (ns) from which they are not delivered any more; 0: the queues' settings
	 * alone decide. */
	int64_t expires;
	/* NULL, or n blocks of properties; a length of 0: that message has none. Body and block together
	 * have max_msg_size - SHMQ_ENVELOPE bytes at most. */
	const shmq_body *properties;
} shmq_terms;
/* Publish as shmq_publish, on these terms. SHMQ_INVALID and SHMQ_TOO_BIG also for the properties. */
int shmq_publish_on(shmq_producer *p, const shmq_body *bodies, uint32_t n, const shmq_terms *terms,
                    int64_t until, uint64_t *first_id);
/* Bytes that properties take on disk beside their block. */
#define SHMQ_ENVELOPE 12u

/*
 * Publish messages at most once, although the caller may have to repeat the call.
 *
 * The publisher names a key, an epoch, and the range of its messages in that epoch: numbers `after`
 * (exclusive) to `upto`. The topic remembers for each key the last epoch and the last number in it;
 * one store decides both this and the publish. An instance remembers 256 keys, and 64 of one `whose`,
 * a hash of a client on the network (0: the caller's own). Where there is no room it forgets the key
 * that was used longest ago: of that `whose`, else of the one that has most, else of this topic.
 * SHMQ_REPEATED: the key has reached `upto` already, or is in a later epoch; nothing was published.
 * SHMQ_INVALID: messages before `after` are missing, or the key was forgotten. (The last five that
 * gave way to another in each of the 256 entries are known.) SHMQ_TABLE_FULL: every entry belongs to
 * another topic of callers on this host. Otherwise as shmq_publish_on.
 * death: messages and mark are both there, or neither is.
 */
typedef struct shmq_sequence {
	uint64_t key[2];
	uint64_t epoch; /* below 2^64 - 2 */
	uint64_t after, upto;
	uint64_t whose;
} shmq_sequence;
int shmq_publish_once(shmq_producer *p, const shmq_body *bodies, uint32_t n,
                      const shmq_terms *terms, const shmq_sequence *mark, int64_t until,
                      uint64_t *first_id);
/* Read a key's progress. out->epoch: its last epoch + 1, or 0 if there is none; out->upto: the last
 * message of that epoch. */
int shmq_sequence_read(shmq_producer *p, const uint64_t key[2], int64_t until, shmq_sequence *out);
/* Sleep until the queue that was full may have room, until `deadline` (CLOCK_MONOTONIC ns), or for
 * 10 ms. Returns 0 if a publish is worth another try; SHMQ_TIMEOUT, SHMQ_INTERRUPTED. */
int shmq_producer_wait(shmq_producer *p, int64_t deadline);
/* Write the name and the limits of the queue that was full into `text`. Returns false if none is
 * known. */
bool shmq_producer_lacks(shmq_producer *p, char *text, size_t size);

/* A loan: a slot and a body of `length` bytes in every channel, filled in place, then published. */
typedef struct shmq_loan shmq_loan;
/* Statuses as shmq_publish. death: the reaper gives the slots back. */
int shmq_loan_begin(shmq_producer *p, uint64_t length, int64_t until, shmq_loan **out);
/* The same with properties, which are copied at once; NULL: without. Statuses as shmq_publish_on.
 * death: as shmq_loan_begin. */
int shmq_loan_begin_on(shmq_producer *p, uint64_t length, const shmq_body *properties,
                       int64_t until, shmq_loan **out);
/* The buffer to fill. */
void *shmq_loan_data(shmq_loan *loan);
/* Publish only the first `length` bytes, from 1 to the loan's length; the caller checks that.
 * The rest of the body stays the message's memory until the message is finished. */
void shmq_loan_truncate(shmq_loan *loan, uint64_t length);
/* Publish. due, id: as shmq_publish. SHMQ_FULL: a channel that was made since shmq_loan_begin lacks
 * room; the loan stays. death: as shmq_publish. */
int shmq_loan_commit(shmq_loan *loan, int64_t due, int64_t until, uint64_t *id);
/* Give slots and bodies back. */
int shmq_loan_cancel(shmq_loan *loan, int64_t until);
/* Free the handle, after a commit or a cancel succeeded, or in a forked child. */
void shmq_loan_free(shmq_loan *loan);

/* ---- take ----------------------------------------------------------------------------------- */

typedef struct shmq_message {
	uint64_t word; /* the slot's state word while the message is in flight to this consumer */
	uint64_t id;
	int64_t timestamp;
	const void *body;
	uint32_t length;
	uint32_t slot;
	uint32_t attempts;
	uint32_t properties; /* bytes of its properties, which end where the body begins; 0: none */
	bool sealed;         /* a sealed producer published it (shmq_producer_seal) */
} shmq_message;

/* Enter a session into the queue. max_in_flight: as shmq_consumer_limit. msg_timeout_ns: 0 for the
 * instance's default, negative for never. SHMQ_TABLE_FULL: the queue has 1024 consumers.
 * death: the reaper frees the session. */
int shmq_consumer_open(shmq_broker *b, uint32_t queue, uint64_t serial, uint32_t max_in_flight,
                       int64_t msg_timeout_ns, int64_t until, shmq_consumer **out);
/* Return the messages that the consumer has not finished to the queue, and free its session; this
 * counts no failure. The handle stays valid (every call answers SHMQ_CLOSED) until shmq_consumer_free. */
int shmq_consumer_close(shmq_consumer *c, int64_t until);
void shmq_consumer_free(shmq_consumer *c);
/*
 * Take up to n messages. Returns 0 with `got` from 1 to n, or SHMQ_EMPTY. The bodies are in shared
 * memory: copy a body and then check with shmq_message_is_ours, or pin it.
 * death: each message is IN_FLIGHT of this client, and the reaper returns it; or it was not taken.
 */
int shmq_take(shmq_consumer *c, shmq_message *out, uint32_t n, int64_t until, uint32_t *got);
/* The same, but stop once the bodies together have max_bytes; at least one message is taken. */
int shmq_take_bytes(shmq_consumer *c, shmq_message *out, uint32_t n, uint64_t max_bytes,
                    int64_t until, uint32_t *got);
/* Set the in-flight limit; 0 pauses the consumer. A thread that is already waiting does not see the
 * new limit until it is woken (shmq_consumer_wake, shmq_waiter_wake). */
void shmq_consumer_limit(shmq_consumer *c, uint32_t max_in_flight);
/* Returns true if the message is still in flight to this consumer: a copy of its body that was made
 * before the call is whole. */
bool shmq_message_is_ours(shmq_consumer *c, const shmq_message *m);
/* Sleep until a message may be available, until `deadline` (CLOCK_MONOTONIC ns), or for 1 s.
 * Returns 0 if a take is worth another try; SHMQ_TIMEOUT, SHMQ_INTERRUPTED. */
int shmq_consumer_wait(shmq_consumer *c, int64_t deadline);
/* Wake every thread of this process that waits on this consumer, also through a shmq_waiter. */
void shmq_consumer_wake(shmq_consumer *c);
/* Hand a wake-up on. Call this when a wait returned because messages may be available but you take
 * none, so that another waiter of the queue, in any process, is woken instead. */
void shmq_consumer_pass(shmq_consumer *c);

/* One thread that waits for many consumers with one doorbell. Without a free doorbell it polls. */
typedef struct shmq_waiter shmq_waiter;
int shmq_waiter_open(shmq_broker *b, shmq_waiter **out);
/*
 * Sleep, without spinning, until one of the n consumers may have a message, is closed or gone,
 * until shmq_waiter_wake, until `deadline` (CLOCK_MONOTONIC ns), or for 1 s. The consumers belong
 * to the waiter's broker, and the caller keeps them. ready: room for n indices; `count` are filled
 * in.
 *
 * Returns 0 if something may have changed: check the consumers and your own set of consumers again
 * (`count` may be 0). SHMQ_TIMEOUT, SHMQ_INTERRUPTED: `count` is 0. A deadline in the past only
 * polls, which is safe from any thread; waiting is for one thread at a time. Each returned index
 * may have consumed a wake-up meant for a single waiter: take from it, or call shmq_consumer_pass.
 * death: the reaper clears its bits in the queues' bitmaps, and rings all waiters of those queues
 * for a ring that it may have consumed.
 */
int shmq_waiter_wait(shmq_waiter *w, shmq_consumer *const *consumers, uint32_t n, int64_t deadline,
                     uint32_t *ready, uint32_t *count);
/* End the wait, or the next one if no thread waits. Several calls count as one. */
void shmq_waiter_wake(shmq_waiter *w);
/*
 * Until shmq_waiter_caught, what this thread does wakes nobody through the waiter; the queues are
 * noted instead. shmq_waiter_caught returns how many were noted, into `queues`, which has room for
 * SHMQ_CAUGHT. For each of them take from one of the consumers for which the waiter waits, announce
 * the waiter again (shmq_waiter_announce) if there are others, or call shmq_waiter_wake.
 * death: of a thread that has caught a ring: the reaper rings all waiters of the queues of its
 * process.
 */
#define SHMQ_CAUGHT 16
void shmq_waiter_catch(shmq_waiter *w);
uint32_t shmq_waiter_caught(uint32_t *queues);
/*
 * While a thread waits for this consumer with the waiter: announce the waiter in its queue again,
 * after a ring that was caught. Any thread may do it. Returns true if there may be something to
 * take, so that no ring will come. shmq_waiter_withdraw undoes it, and returns the same.
 * death: as of shmq_waiter_wait.
 */
bool shmq_waiter_announce(shmq_waiter *w, shmq_consumer *c);
bool shmq_waiter_withdraw(shmq_waiter *w, shmq_consumer *c);
/* Give its doorbell back, unless a detach has done so already. No thread may be in
 * shmq_waiter_wait. The handle stays valid (a call answers SHMQ_CLOSED or does nothing) until
 * shmq_waiter_free. */
void shmq_waiter_close(shmq_waiter *w);
void shmq_waiter_free(shmq_waiter *w);

/*
 * One consumer of many queues, its lanes. Each lane is a shmq_consumer, which the caller opens and
 * keeps; messages are settled through it. Any thread may take. The process's own words are
 * protected by a mutex that nobody holds while it waits.
 *
 * Each lane is on one of `levels` levels; the lanes of a level take turns. strict: a level is
 * served only while no lane of those before it has a message that may be taken. Otherwise the
 * levels share by their weights, from 1 to SHMQ_WEIGHT_MOST, as long as they have messages.
 */
#define SHMQ_WEIGHT_MOST 1000000u
typedef struct shmq_lanes shmq_lanes;
/* max_in_flight: over all lanes; that of each lane is to be as high. follows: waiting also ends
 * when a topic or a channel comes or goes (shmq_directory_generation). Without a free doorbell it
 * polls. SHMQ_INVALID: no level, or a wrong weight. death: the reaper frees the doorbell. */
int shmq_lanes_open(shmq_broker *b, bool strict, bool follows, const uint32_t *weights,
                    uint32_t levels, uint32_t max_in_flight, shmq_lanes **out);
/* Add a lane, of the same broker, behind the others of its level. tag: what shmq_lanes_take gives
 * back for it. It stays until shmq_lanes_remove, which comes before shmq_consumer_close. */
int shmq_lanes_add(shmq_lanes *l, shmq_consumer *c, uint32_t level, void *tag);
/* Remove a lane. The consumer is to be kept as long as a thread is in shmq_lanes_take. */
void shmq_lanes_remove(shmq_lanes *l, shmq_consumer *c);
void shmq_lanes_limit(shmq_lanes *l, uint32_t max_in_flight);
/*
 * Take up to n messages from the lane that is next, as shmq_take. tag: of the lane, also of the one
 * that a failure is about (SHMQ_GONE, SHMQ_CORRUPT, SHMQ_NEED_MAP). SHMQ_EMPTY: no lane has
 * anything, or max_in_flight messages are in flight. A lane whose lock is held elsewhere is passed
 * over; SHMQ_AGAIN: no other one has anything.
 * death: as shmq_take, for the one lane.
 */
int shmq_lanes_take(shmq_lanes *l, shmq_message *out, uint32_t n, int64_t until, uint32_t *got,
                    void **tag);
/* Returns true if shmq_lanes_take would find something, or an error. */
bool shmq_lanes_look(shmq_lanes *l);
/*
 * Sleep until a lane may have something, a message was settled while max_in_flight were in flight,
 * until shmq_lanes_wake, until `deadline` (CLOCK_MONOTONIC ns), or for 1 s. Of several threads one
 * sleeps on the doorbell and the others wait for it. Returns 0 if a take is worth another try;
 * SHMQ_TIMEOUT, SHMQ_INTERRUPTED. A wake-up may have been consumed: take, or call shmq_lanes_pass.
 * death: the reaper clears its bits in the queues' bitmaps, and rings everybody.
 */
int shmq_lanes_wait(shmq_lanes *l, int64_t deadline);
/* End the wait, or the next one if no thread waits. Several calls count as one. */
void shmq_lanes_wake(shmq_lanes *l);
/* A message of a lane was settled: wake a thread that waits for that. */
void shmq_lanes_settled(shmq_lanes *l);
/* Take nothing after a wait: wake other waiters of the queues that have something. */
void shmq_lanes_pass(shmq_lanes *l);
/* Withdraw from all queues, and give the doorbell back, or have the thread that sleeps do that.
 * The handle stays valid (every call answers SHMQ_CLOSED) until shmq_lanes_free. */
void shmq_lanes_close(shmq_lanes *l);
/* No thread may be in a call. */
void shmq_lanes_free(shmq_lanes *l);
/* A number that rises whenever a topic or a channel is made, deleted or paused, and when another
 * supervisor begins, which may do what the one before could not. */
uint64_t shmq_directory_generation(const shmq_broker *b);

/* Finish: for each m[i], ok[i] = 1 and its state changed, or ok[i] = 0 (it is not in flight to this
 * consumer). Returns 0 if all changed, else SHMQ_NOT_IN_FLIGHT. ok may be NULL.
 * death: the messages whose state word changed are finished, the others are not. */
int shmq_finish(shmq_consumer *c, const shmq_message *m, uint32_t n, uint8_t *ok, int64_t until);
/*
 * Requeue, as shmq_finish. delay_ns is clamped to [0, max_req_timeout]; 0: into the queue at once,
 * after what is published. In a queue with max_attempts or a retry delay this counts a failure of
 * each message; one that has failed max_attempts times is convicted: the supervisor moves it to the
 * channel's dead topic.
 * death: each message is in flight, or it is back. A delivery's failure is counted once.
 */
int shmq_requeue(shmq_consumer *c, const shmq_message *m, uint32_t n, int64_t delay_ns, uint8_t *ok,
                 int64_t until);
/* The same after the queue's retry delay, if it has one, else at once. death: as shmq_requeue. */
int shmq_retry(shmq_consumer *c, const shmq_message *m, uint32_t n, uint8_t *ok, int64_t until);
/* Requeue without counting a failure. death: as shmq_requeue. */
int shmq_release(shmq_consumer *c, const shmq_message *m, uint32_t n, int64_t delay_ns, uint8_t *ok,
                 int64_t until);
/* Convict the messages at once, as shmq_finish. The supervisor leaves them to the caller for hold_ns,
 * for a shmq_dead_move of its own, and moves them then. SHMQ_BAD_NAME: as shmq_dead_topic.
 * SHMQ_INVALID: their topic holds dead letters itself. death: each message is in flight, or it is
 * convicted. */
int shmq_reject(shmq_consumer *c, const shmq_message *m, uint32_t n, int64_t hold_ns, uint8_t *ok,
                int64_t until);

typedef struct shmq_dead_target {
	uint32_t topic, generation;
	const char *error; /* NULL, or what went wrong; the first 1024 bytes of it are kept */
	uint32_t error_length;
} shmq_dead_target;
typedef struct shmq_dead_wish {
	const shmq_message *messages; /* NULL, or n of them */
	uint32_t n;
} shmq_dead_wish;
/*
 * Move convicted messages of a queue to a topic, each in one transaction: up to n of those whose
 * time has come; or, if `messages` is not NULL, those of the n messages of shmq_reject that are still
 * there. Id, timestamp, attempts, body and properties stay. These are added, as texts: dead-reason
 * (attempts, rejected, expired, overflow), dead-from (topic/channel), dead-failures, dead-when (ns
 * since 1970), dead-pid (of the last consumer) and dead-error. moved: how many. SHMQ_EMPTY: there is
 * none.
 * SHMQ_NEED_BACKLOG: the topic has no queue. SHMQ_FULL: it has no room. SHMQ_INVALID: it is the
 * queue's own topic.
 * death: each message is in the queue and convicted, or it is in every queue of the topic.
 */
int shmq_dead_move(shmq_broker *b, uint32_t queue, uint64_t serial, const shmq_dead_target *to,
                   const shmq_dead_wish *wish, int64_t until, uint32_t *moved);
/* Move messages in flight to this consumer to one channel's queue of another topic, each in one
 * transaction, as shmq_finish. Their failures, and properties that a death added, are forgotten, and
 * their timestamp is the time of the call. ok: n entries. SHMQ_FULL: there is no room for the others.
 * SHMQ_INVALID: that topic is paused.
 * death: each message is in flight or back in its queue, or it is in the other queue. */
int shmq_redrive(shmq_consumer *c, const shmq_message *m, uint32_t n, uint32_t queue,
                 uint64_t serial, uint8_t *ok, int64_t until);
/* Touch, as shmq_finish: the new deadline is now + msg_timeout, at most delivery +
 * max_msg_timeout. */
int shmq_touch(shmq_consumer *c, const shmq_message *m, uint32_t n, uint8_t *ok, int64_t until);

/* A message in flight, to whichever consumer of the queue. */
typedef struct shmq_held {
	uint64_t serial, id;
	uint32_t queue;
	int32_t pid; /* only if this process holds it; 0: whoever does */
} shmq_held;
/*
 * Finish a message for its consumer, or requeue it: an operator's decision. Its consumer's own finish,
 * requeue and touch then answer SHMQ_NOT_IN_FLIGHT, as after a time-out, and it may take another one.
 * A requeue counts no failure; delay_ns: as shmq_requeue. SHMQ_NOT_IN_FLIGHT: nobody, or not that
 * process, holds such a message; nothing was done. Two dead letters of one dead topic may have the same
 * id: one of them is meant.
 * death: as shmq_finish, as shmq_release.
 */
int shmq_held_finish(shmq_broker *b, const shmq_held *m, int64_t until);
int shmq_held_requeue(shmq_broker *b, const shmq_held *m, int64_t delay_ns, int64_t until);

/* Keep the body in place until shmq_unpin, also after the message is finished or times out.
 * SHMQ_NOT_IN_FLIGHT; SHMQ_TABLE_FULL: the client's log of pins is full (copy instead).
 * death: the reaper removes the client's pins. */
int shmq_pin(shmq_consumer *c, const shmq_message *m, int64_t until);
int shmq_unpin(shmq_consumer *c, const shmq_message *m, int64_t until);

typedef struct shmq_consumer_info {
	uint32_t queue, session, in_flight, max_in_flight;
	uint64_t serial, delivered, finished, requeued, timed_out;
} shmq_consumer_info;
/* The consumer's session, read without a lock. */
void shmq_consumer_get_info(const shmq_consumer *c, shmq_consumer_info *out);

#ifdef __cplusplus
}
#endif

#include "shmq_lease.h"

#endif
