/*
 * What the binding's files share. The binding knows <Python.h> (Limited API 3.11) and shmq.h,
 * nothing of core/. It has no logic of its own beyond: parse, one core call, convert.
 *
 * Calling the core. A call first only tries its locks, with the GIL held, because that is all it
 * takes nearly always and costs nothing; if one is held elsewhere (SHMQ_AGAIN) the GIL is released
 * and the call made again in slices, with a look at signals between them, so Ctrl-C and other
 * threads live on behind a stopped holder. CORE_CALL is that, CORE_WAIT one call without the GIL.
 *
 * Whatever else a status asks of the caller (map a segment, wait for room, attach anew after a
 * fork) the ..._retry functions do; an operation is a loop around one CORE_CALL and one of them.
 *
 * Lifetime. Handles of the core live as long as their Python object, so a thread that is inside a
 * call without the GIL always has a valid one; close() only makes the object unusable.
 */
#ifndef SHMQ_BINDING_MODULE_H
#define SHMQ_BINDING_MODULE_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include "shmq.h"
#include "shmq_supervisor.h"
#include "shmq_wire.h"

#include <stdbool.h>
#include <stdint.h>

#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

#define SECOND_NS INT64_C(1000000000)
#define LOCK_SLICE_NS (SECOND_NS / 10)
#define WAIT_SLICE_NS (SECOND_NS / 4)
#define FOR_EVER INT64_MAX

enum {
	STATUSES = 0
#define X(name, value, exception, sentence) +1
	SHMQ_STATUS_TABLE(X)
#undef X
};
#define CORE_RAISED 1 /* beside the core's statuses: a Python exception is set */
#define CORE_STOPPED 2 /* SHMQ_GONE, because the whole instance was stopped */

/* ---- module state and objects --------------------------------------------------------------- */

typedef struct module_state {
	PyTypeObject *broker, *segment, *spill, *producer, *loan, *consumer, *message, *batch,
			*waiter, *window;
	PyObject *error;                /* ShmqError */
	PyObject *exceptions[STATUSES]; /* by -status */
} module_state;

/* What the public types begin with; `state` is set by type_new, before any __init__. */
#define OBJECT_HEAD                                                                                \
	PyObject_HEAD                                                                                  \
	module_state *state;

typedef struct any_object {
	OBJECT_HEAD
} any_object;

typedef struct broker_object {
	OBJECT_HEAD
	shmq_broker *handle;
	PyObject *opener;
	PyObject *instance; /* str, for messages */
	struct waiter_object *waiters; /* borrowed; detach wakes them */
	uint32_t active;    /* threads that are in the core without the GIL */
	bool closed;        /* detach was called */
} broker_object;

typedef struct pending_loan {
	struct pending_loan *next;
	shmq_loan *loan;
} pending_loan;

typedef struct producer_object {
	OBJECT_HEAD
	broker_object *broker;
	shmq_producer *handle;
	PyObject *topic; /* str */
	PyObject *on_backlog, *on_forked;
	pending_loan *pending; /* to cancel; their lock was held elsewhere when they were dropped */
	uint32_t epoch;        /* raised when it was opened anew in a forked child */
	uint32_t loans;        /* handles of loans that refer to `handle` */
	bool closed;
} producer_object;

typedef struct pending_unpin {
	struct pending_unpin *next;
	shmq_message message;
} pending_unpin;

typedef struct consumer_object {
	OBJECT_HEAD
	broker_object *broker;
	shmq_consumer *handle;
	PyObject *topic, *channel; /* str */
	PyTypeObject *batch_type;
	PyObject *on_forked;
	int64_t msg_timeout;
	uint32_t max_in_flight;
	uint32_t epoch;  /* raised when it was opened anew in a forked child */
	uint32_t pinned; /* messages that have a pin */
	uint32_t scratch_size;
	shmq_message *scratch; /* NULL while a take_many uses it */
	PyObject *spare;       /* block of a batch that is gone, to be used again */
	pending_unpin *pending;
	bool closed;
} consumer_object;

typedef struct waiter_object {
	OBJECT_HEAD
	broker_object *broker;
	shmq_waiter *handle;
	struct waiter_object *next; /* of the broker's */
	bool waiting;               /* a thread is in shmq_waiter_wait */
	bool closed;
} waiter_object;

typedef struct window_object {
	OBJECT_HEAD
	consumer_object *consumer;
	shmq_window *handle;
	uint64_t random; /* state of the sampling */
} window_object;

typedef struct batch_object {
	PyObject_HEAD
	consumer_object *consumer;
	shmq_message *messages; /* their bodies lie in `block` */
	uint8_t *settled;       /* by index: finished, requeued or lost; behind `messages` */
	PyObject *block;        /* bytes: offsets (int64), the bodies, perhaps more room */
	const int64_t *offsets;
	const char *data;
	uint32_t count, open; /* open: not settled */
	uint32_t epoch;
} batch_object;

typedef struct message_object {
	PyObject_HEAD
	consumer_object *consumer;
	batch_object *batch; /* NULL: taken singly, the body lies in shared memory */
	PyObject *body;      /* bytes, once made */
	shmq_message message;
	uint32_t epoch;
	uint32_t index;   /* in the batch */
	uint32_t exports; /* buffers alive */
	bool pinned;
	bool settled; /* finished, requeued or lost; of a batch's its own word counts */
} message_object;

/* ---- calling the core ----------------------------------------------------------------------- */

/* `call` once, without the GIL, with `until` at most `slice` from now and not after `deadline`. */
#define CORE_WAIT(at, status, deadline, slice, call)                                               \
	do {                                                                                           \
		broker_object *entered = broker_enter(at);                                                 \
                                                                                                   \
		Py_BEGIN_ALLOW_THREADS                                                                     \
		int64_t until = earlier(deadline, shmq_now() + (slice));                                   \
		(status) = (call);                                                                         \
		Py_END_ALLOW_THREADS                                                                       \
		broker_leave(entered);                                                                     \
	} while (0)

/* `call` (its time limit is named `until`) until it gets its locks: tried with the GIL, then waited
 * for without it. CORE_RAISED if a signal handler raised; then nothing was done. */
#define CORE_CALL(at, status, call)                                                                \
	do {                                                                                           \
		{                                                                                          \
			const int64_t until = 0;                                                               \
                                                                                                   \
			(status) = (call);                                                                     \
		}                                                                                          \
		if (UNLIKELY((status) == SHMQ_AGAIN))                                                      \
			CORE_CALL_SLOWLY(at, status, call);                                                    \
	} while (0)

/* The same for what takes long (disk, repair, many messages): never with the GIL. */
#define CORE_CALL_SLOWLY(at, status, call)                                                         \
	do {                                                                                           \
		CORE_WAIT(at, status, FOR_EVER, LOCK_SLICE_NS, call);                                      \
		if ((status) == SHMQ_AGAIN && PyErr_CheckSignals() < 0)                                    \
			(status) = CORE_RAISED;                                                                \
	} while ((status) == SHMQ_AGAIN)

/* How far an operation got that may have to be tried again. */
typedef struct attempt {
	int64_t timeout;  /* ns to wait for messages or room; FOR_EVER */
	int64_t deadline; /* CLOCK_MONOTONIC; 0: has not waited yet */
	uint32_t missing; /* segments that were gone when they were to be mapped */
	uint32_t backlogs;
} attempt;

static inline int64_t earlier(int64_t a, int64_t b)
{
	return a < b ? a : b;
}
static inline int64_t later_by(int64_t time, int64_t ns)
{
	return ns > INT64_MAX - time ? FOR_EVER : time + ns;
}
static inline broker_object *broker_enter(broker_object *broker)
{
	Py_INCREF((PyObject *)broker);
	broker->active++;
	return broker;
}
static inline void broker_leave(broker_object *broker)
{
	broker->active--;
	Py_DECREF((PyObject *)broker);
}
/* Is there time left to wait? */
bool attempt_waits(attempt *a);

/* ---- errors.c ------------------------------------------------------------------------------- */

int errors_add(PyObject *module, module_state *state);
/* The one raiser: "<tried>: <the status's sentence>; <hint>". hint NULL: the status's usual one.
 * Returns NULL. CORE_RAISED: what is set stays. */
PyObject *raise_status(module_state *state, int status, const char *hint, const char *tried, ...);

/* ---- arguments.c ---------------------------------------------------------------------------- */

enum argument_kind {
	ARGUMENT_OBJECT,      /* PyObject *, borrowed */
	ARGUMENT_BOOL,        /* bool */
	ARGUMENT_INT,         /* int */
	ARGUMENT_U32,         /* uint32_t */
	ARGUMENT_U64,         /* uint64_t */
	ARGUMENT_I64,         /* int64_t */
	ARGUMENT_TEXT,        /* const char *, of a str */
	ARGUMENT_TEXT_OR_NONE /* const char * or NULL */
};
typedef struct argument {
	const char *name;
	enum argument_kind kind;
	void *out;
} argument;
/* Positional and keyword arguments; the first `required` must be there, the others keep what is in
 * *out. 0, or -1 with TypeError, ValueError or OverflowError. */
int arguments_parse(const char *function, const argument *expected, Py_ssize_t count,
                    Py_ssize_t required, PyObject *const *args, Py_ssize_t nargs,
                    PyObject *kwnames);
#define ARGUMENTS(function, required, ...)                                                         \
	arguments_parse(function, (const argument[]){__VA_ARGS__},                                     \
	                sizeof((const argument[]){__VA_ARGS__}) / sizeof(argument), required, args,    \
	                nargs, kwnames)
/* Seconds as ns, >= 0; None: FOR_EVER if `forever`, else 0. */
int seconds_parse(PyObject *value, const char *name, bool forever, int64_t *ns);
int limits_parse(const char *function, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                 shmq_limits *limits);
void id_hex(uint64_t id, char *text); /* 16 digits, not terminated */
PyObject *id_str(uint64_t id);

/* ---- types ---------------------------------------------------------------------------------- */

module_state *state_of(PyTypeObject *type); /* also of a subclass made in Python */
PyObject *type_new(PyTypeObject *type, PyObject *args, PyObject *kwargs);
void object_free(PyObject *self); /* the end of a dealloc: memory and reference to the type */
PyObject *closed_get(PyObject *self, void *offset);
PyObject *object_get(PyObject *self, void *offset);

/* broker_type.c */
bool broker_usable(broker_object *self, const char *tried);
/* SHMQ_GONE as CORE_STOPPED if that is why; any other status as it is. */
int broker_gone(broker_object *self, int status);
/* After SHMQ_NEED_MAP: open and map what is missing. True: try again; false: an exception is set. */
bool broker_map_missing(broker_object *self, attempt *a);
/* The result of on_forked(): a new broker and the two numbers a handle is opened with. */
int forked_call(module_state *state, PyObject *on_forked, broker_object **broker, uint64_t *first,
                uint64_t *second);

/* An operation of the broker until its locks are held and its segments mapped; `call` may use
 * `self->handle` and `until`. */
#define BROKER_CALL(self, status, call)                                                            \
	do {                                                                                           \
		attempt mapping = {0};                                                                     \
                                                                                                   \
		do {                                                                                       \
			if (!broker_usable(self, "use the broker"))                                            \
				(status) = CORE_RAISED;                                                            \
			else                                                                                   \
				CORE_CALL_SLOWLY(self, status, call);                                              \
			if ((status) == SHMQ_NEED_MAP && !broker_map_missing(self, &mapping))                  \
				(status) = CORE_RAISED;                                                            \
		} while ((status) == SHMQ_NEED_MAP);                                                       \
	} while (0)

/* The same for the supervisor's loops, which have other queues to see to: after one slice behind a
 * stopped holder the status stays SHMQ_AGAIN, which raises Busy. */
#define BROKER_TRY(self, status, call)                                                             \
	do {                                                                                           \
		attempt mapping = {0};                                                                     \
                                                                                                   \
		do {                                                                                       \
			if (!broker_usable(self, "use the broker"))                                            \
				(status) = CORE_RAISED;                                                            \
			else                                                                                   \
				CORE_WAIT(self, status, FOR_EVER, LOCK_SLICE_NS / 4, call);                        \
			if ((status) == SHMQ_NEED_MAP && !broker_map_missing(self, &mapping))                  \
				(status) = CORE_RAISED;                                                            \
		} while ((status) == SHMQ_NEED_MAP);                                                       \
	} while (0)

/* supervise.c: X(C function, Python name, signature and docstring) */
#define SUPERVISOR_METHODS(X)                                                                      \
	X(set_data_path, "set_data_path($self, path)\n--\n\nWhere the files are, absolute.")          \
	X(disk_trouble, "disk_trouble($self, errno)\n--\n\nWhat the data path refuses with; 0: nothing.") \
	X(supervise, "supervise($self, **limits)\n--\n\nThis client is the supervisor now.")           \
	X(supervisor_wait,                                                                             \
	  "supervisor_wait($self, deadline)\n--\n\nSleep on the supervisor's doorbell.")               \
	X(scan_at, "scan_at($self, deadline, due)\n--\n\nThe scanner sleeps until then.")            \
	X(attend, "attend($self, queue)\n--\n\nThe spiller is to look at this queue.")                 \
	X(attention, "attention($self)\n--\n\nQueues that the spiller is to look at.")                \
	X(names_written,                                                                               \
	  "names_written($self, replaced, written)\n--\n\nThe metadata's times, before and then.")     \
	X(stopping, "stopping($self)\n--\n\nNo attach and no request from now on.")                    \
	X(close_directory, "close_directory($self)\n--\n\nEvery handle answers Gone from now on.")     \
	X(next_request, "next_request($self)\n--\n\nThe next posted request or None.")                 \
	X(answer, "answer($self, ticket, status)\n--\n\nAnswer a request.")                            \
	X(create_topic, "create_topic($self, topic, clock_floor)\n--\n\nEnter a topic.")               \
	X(reserve_queue, "reserve_queue($self)\n--\n\nA free queue index and a new serial.")           \
	X(create_queue,                                                                                \
	  "create_queue($self, fd, queue, serial, topic, base, disk_read=0, disk_write=0, "            \
	  "disk_depth=0, ephemeral=False, paused=False, chunk=0, chunk_depth=0)\n--\n\n"               \
	  "Fill a new queue segment.")                                                                 \
	X(enter_queue, "enter_queue($self, queue, serial, topic, channel)\n--\n\nMake it visible.")    \
	X(take_over, "take_over($self, topic, channel)\n--\n\nThe backlog becomes the channel.")       \
	X(renamed, "renamed($self, queue, base)\n--\n\nThe files of a take-over were renamed.")        \
	X(remove_queue, "remove_queue($self, queue, serial, closed=False, idle=False)\n--\n\n"              \
	                "Out of the directory; idle: unless it has a consumer. Whether it was.")           \
	X(give_back, "give_back($self, queue)\n--\n\nPages behind the last body; how many bytes.")      \
	X(remove_topic, "remove_topic($self, topic, generation)\n--\n\nOut of the directory.")         \
	X(expire, "expire($self, queue, limit=256, now=None, realtime=None)\n--\n\n"                   \
	          "One bite of nsqd's scan.")                                                          \
	X(advance, "advance($self, queue, n)\n--\n\nMove the oldest READY to the requeue ring.")       \
	X(spill_begin,                                                                                 \
	  "spill_begin($self, queue, n, max_bytes, everything=False, ahead=False, "                \
	  "returned=False, front=False, out=False)\n--\n\n"                                             \
	  "Mark messages SPILLING.")                                                                   \
	X(chunk_begin,                                                                                 \
	  "chunk_begin($self, queue, chunk, from_due, n, max_bytes)\n--\n\n"                          \
	  "Mark deferred messages SPILLING.")                                                          \
	X(chunk_load,                                                                                  \
	  "chunk_load($self, queue, data, dues, position)\n--\n\nDeferred messages back into memory.") \
	X(chunk_depth, "chunk_depth($self, queue, depth)\n--\n\nHow many messages chunks hold.")      \
	X(restore,                                                                                     \
	  "restore($self, queue, data, position, next_position)\n--\n\nRecords back into memory.")     \
	X(disk_adopt,                                                                                  \
	  "disk_adopt($self, queue, read_position, write_position, depth, chunk)\n--\n\n"              \
	  "On disk is what another broker left.")                                                      \
	X(disk_set,                                                                                    \
	  "disk_set($self, queue, expected, read_position, depth)\n--\n\nThe read position jumps.")    \
	X(unrestore, "unrestore($self, queue)\n--\n\nWhat was read ahead goes back to disk.")          \
	X(pump, "pump($self, topic, generation, n)\n--\n\nFrom the backlog to the channels.")          \
	X(adopt, "adopt($self, queue)\n--\n\nResolve what a dead supervisor left.")                    \
	X(rebuild, "rebuild($self, queue)\n--\n\nRebuild what is derived.")                            \
	X(audit, "audit($self, queue)\n--\n\nRebuild what is derived if it does not add up.")            \
	X(reap_scan,                                                                                   \
	  "reap_scan($self, ended=-1, every=1000000000, deadline=0)\n--\n\n"                          \
	  "Clients whose life lock is free.")                                                          \
	X(reap_spare, "reap_spare($self, client, generation)\n--\n\nOnly its thread ended.")           \
	X(reap, "reap($self, client, generation)\n--\n\nGive back what a dead client held.")
#define X(name, doc)                                                                               \
	PyObject *broker_##name(broker_object *self, PyObject *const *args, Py_ssize_t nargs,          \
	                        PyObject *kwnames);
/* clang-format off */
SUPERVISOR_METHODS(X)
/* clang-format on */
#undef X

/* lease.c: X(C function, Python name, signature and docstring) */
#define LEASE_METHODS(X)                                                                           \
	X(lessee_open,                                                                                 \
	  "lessee_open($self, queue, serial, name, ttl=0, grace=0)\n--\n\n"                            \
	  "(index, incarnation) of who leases under this name from now on.")                           \
	X(lessee_touch, "lessee_touch($self, lessee)\n--\n\nA sign of life.")                          \
	X(lessee_close, "lessee_close($self, lessee)\n--\n\nNobody's from now on.")                    \
	X(lease_take,                                                                                  \
	  "lease_take($self, lessee, parent, n, max_bytes, parts, run=None)\n--\n\nA lease or None.")            \
	X(lease_look, "lease_look($self, lessee, id, replay=False)\n--\n\nThe lease.")                 \
	X(lease_list, "lease_list($self, lessee)\n--\n\nThe open leases, in order.")                   \
	X(lease_finish,                                                                                \
	  "lease_finish($self, lessee, through)\n--\n\nFinish leases; how many messages.")             \
	X(lease_return, "lease_return($self, lessee, id)\n--\n\nGive one back; how many messages.")    \
	X(lease_end,                                                                                   \
	  "lease_end($self, queue, serial, id, back)\n--\n\nEnd anybody's; how many messages.")        \
	X(lease_wait, "lease_wait($self, lessee, deadline)\n--\n\nMay there be something to lease?")   \
	X(lease_open, "lease_open($self, queue, serial, id, part)\n--\n\nA cursor.")                   \
	X(lease_read,                                                                                  \
	  "lease_read($self, cursor, rows, max_bytes)\n--\n\n"                                         \
	  "(cursor, count, ids, timestamps, attempts, offsets, data) of the next messages.")
#define X(name, doc)                                                                               \
	PyObject *broker_##name(broker_object *self, PyObject *const *args, Py_ssize_t nargs,          \
	                        PyObject *kwnames);
/* clang-format off */
LEASE_METHODS(X)
/* clang-format on */
#undef X

/* spill_type.c */
PyObject *spill_new(broker_object *broker, shmq_spill *spill); /* owns spill->slots, lengths */

/* producer_type.c */
bool producer_usable(producer_object *self);
/* What `status` asks for before the next try. True: try again; false: an exception is set. */
bool producer_retry(producer_object *self, attempt *a, int status);

/* loan_type.c */
PyObject *loan_new(producer_object *producer, uint64_t length, int64_t defer, int64_t timeout,
                   bool zero);
/* Cancel the loans that were dropped while their lock was held elsewhere; last: or let them be. */
void loans_pending(producer_object *producer, bool last);

/* consumer_type.c */
bool consumer_usable(consumer_object *self);
enum settle { SETTLE_FINISH, SETTLE_REQUEUE, SETTLE_TOUCH };
/* shmq_finish, _requeue or _touch of messages taken in `epoch`. */
int consumer_settle(consumer_object *self, uint32_t epoch, enum settle what, const shmq_message *m,
                    uint32_t n, int64_t delay, uint8_t *ok);
PyObject *settle_raise(consumer_object *self, int status, enum settle what, uint32_t epoch,
                       uint32_t n, uint32_t lost, uint64_t first);
void consumer_unpin(consumer_object *self, const shmq_message *m, uint32_t epoch);
void unpin_pending(consumer_object *self);

/* message_type.c */
#define BODY_COPIED 4096u /* bodies up to this are copied when taken, longer ones when asked for */
/* NULL without an exception: it was lost before its body was copied. */
PyObject *message_new(consumer_object *consumer, const shmq_message *m);
PyObject *message_of_batch(batch_object *batch, uint32_t index);

/* batch_type.c */
/* Batch of n > 0 messages just taken; NULL without an exception: all were lost meanwhile. */
PyObject *batch_new(consumer_object *consumer, const shmq_message *messages, uint32_t n);
void batch_settled(batch_object *batch, uint32_t index);

/* waiter_type.c */
void waiters_wake(broker_object *broker);

extern PyType_Spec broker_spec, segment_spec, spill_spec, producer_spec, loan_spec, consumer_spec,
		message_spec, batch_spec, waiter_spec, window_spec;

#define METHOD(name, function, flags, doc)                                                         \
	{name, (PyCFunction)(void (*)(void))(function), flags, doc}
#define FAST (METH_FASTCALL | METH_KEYWORDS)

#endif
