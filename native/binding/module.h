/*
 * Declarations that the binding's files share. The binding knows <Python.h> (Limited API 3.11) and
 * the headers of native/include, and nothing of core/. A method parses its arguments, makes one
 * core call and converts the result; it has no rules of its own.
 *
 * Calling the core. A call first tries its locks with the GIL held, because they are nearly always
 * free. If a lock is held elsewhere (SHMQ_AGAIN), the GIL is released and the call is repeated in
 * slices, with a check for signals after each slice. Ctrl-C and other threads therefore keep
 * working even if the holder of the lock is stopped. CORE_CALL does this; CORE_WAIT is one call
 * without the GIL.
 *
 * The ..._retry functions do what any other status asks of the caller: map a segment, wait for
 * room, attach again after a fork. An operation is a loop around one CORE_CALL and one of them.
 *
 * Lifetime. A handle of the core lives as long as its Python object, so a thread that is inside a
 * call without the GIL always has a valid one. close() only makes the object unusable.
 *
 * Methods. METHOD (arguments.h) writes the parsing of a method's arguments. The methods that are
 * called for every message parse theirs by hand.
 */
#ifndef SHMQ_BINDING_MODULE_H
#define SHMQ_BINDING_MODULE_H

#include "arguments.h"
#include "docstrings.h" /* made from shmq/_native.pyi: DOC_... */

#include "shmq.h"
#include "shmq_store.h"
#include "shmq_supervisor.h"
#include "shmq_wire.h"

#include <structmember.h>

#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

#define SECOND_NS INT64_C(1000000000)
#define LOCK_SLICE_NS (SECOND_NS / 10)
#define WAIT_SLICE_NS (SECOND_NS / 4)
#define PATIENCE_NS (5 * SECOND_NS) /* shmq/patience.py: AFTER */

enum {
	STATUSES = 0
#define X(name, value, exception, sentence) +1
	SHMQ_STATUS_TABLE(X)
#undef X
};
/* Two statuses more than the core has. */
#define CORE_RAISED 1  /* a Python exception is set */
#define CORE_STOPPED 2 /* SHMQ_GONE, because the whole instance was stopped */

/* ---- module state and objects --------------------------------------------------------------- */

/* clang-format off */
#define TYPES(X) \
	X(broker) X(segment) X(spill) X(producer) X(loan) X(consumer) X(message) X(batch) X(waiter) \
	X(window) X(intake) X(store) X(lanes)
/* clang-format on */
#define X(name) PyTypeObject *name;
typedef struct module_state {
	TYPES(X)
	PyObject *error;                /* ShmqError */
	PyObject *reply;                /* the package's function, once it was needed */
	PyObject *exceptions[STATUSES]; /* by -status */
} module_state;
#undef X

/* The head of every public type; type_new sets `state`, before any __init__. */
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
	PyObject *instance;            /* str, for error messages */
	struct waiter_object *waiters; /* list, borrowed; detach wakes them */
	struct lanes_object *lanes;    /* as `waiters` */
	uint32_t active;               /* threads that are in the core without the GIL */
	bool closed;                   /* detach was called */
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
	pending_loan *pending; /* to be cancelled: a lock was held elsewhere when they were dropped */
	uint32_t epoch;        /* raised when it is opened again in a forked child */
	uint32_t loans;        /* number of loans that refer to `handle` */
	bool closed;
	bool sealed; /* also the handle that a forked child opens */
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
	uint32_t epoch;  /* raised when it is opened again in a forked child */
	uint32_t pinned; /* number of messages that have a pin */
	uint32_t scratch_size;
	shmq_message *scratch; /* NULL while a take_many is using it */
	PyObject *spare;       /* block of a batch that was freed, for the next batch */
	pending_unpin *pending;
	struct lanes_object *lanes; /* borrowed: of which it is a lane; NULL: of none */
	PyObject *beacon;           /* is called when there was nothing to take; NULL: nobody asked */
	bool closed;
} consumer_object;

typedef struct lanes_object {
	OBJECT_HEAD
	broker_object *broker;
	shmq_lanes *handle;
	PyTypeObject *batch_type;
	PyObject *members;         /* dict: the consumers, in the order in which they came */
	PyObject *retired;         /* list of those that left while a thread was inside; NULL: none */
	PyObject *beacon;          /* as of consumer_object */
	struct lanes_object *next; /* in the broker's list */
	uint32_t *weights;         /* one for each level */
	uint32_t levels, max_in_flight;
	uint32_t inside;     /* threads that are in the core without the GIL */
	uint32_t generation; /* of the process that opened the handle */
	uint64_t names;      /* the directory's generation that the subclass was told of */
	bool strict, follows;
	bool hearing; /* the subclass is being told */
	bool closed;
} lanes_object;

typedef struct waiter_object {
	OBJECT_HEAD
	broker_object *broker;
	shmq_waiter *handle;
	struct waiter_object *next; /* in the broker's list */
	bool waiting;               /* a thread is in shmq_waiter_wait */
	bool closed;
} waiter_object;

typedef struct store_object {
	OBJECT_HEAD
	broker_object *broker;
	shmq_store *handle;
	PyObject *name; /* str */
	PyObject *on_forked;
	uint32_t epoch; /* raised when it is opened again in a forked child */
} store_object;

typedef struct window_object {
	OBJECT_HEAD
	consumer_object *consumer;
	shmq_window *handle;
	uint64_t random; /* state of the sampling */
} window_object;

typedef struct intake_object {
	OBJECT_HEAD
	PyObject *on_room, *on_input, *on_unsent; /* the connection's; NULL after close() */
	PyObject *on_rung;                        /* NULL: there is no `waiter` */
	waiter_object *waiter;
	/* While it publishes; else NULL. */
	PyObject *room; /* memoryview */
	PyObject *line; /* bytes */
	producer_object *producer;
	uint64_t max_msg_size, max_body_size;
	uint64_t published; /* messages, not yet told to the connection */
	int64_t heard;      /* shmq_now() of the last one */
	int64_t catch_at;   /* before that time the waiter's thread is woken */
	uint32_t rung[SHMQ_CAUGHT];
	int fd;
	bool was_open;
} intake_object;

typedef struct batch_object {
	PyObject_HEAD
	consumer_object *consumer;
	shmq_message *messages;  /* their bodies lie in `block` */
	uint8_t *settled;        /* by index: finished, requeued or lost; after `messages` */
	PyObject *block;         /* bytes: offsets (int64), the bodies, perhaps unused room */
	PyObject *properties;    /* bytes: the messages' properties; NULL: none has any */
	uint32_t *properties_at; /* by index: where those of a message begin */
	const int64_t *offsets;
	const char *data;
	uint32_t count, open; /* open: those not settled yet */
	uint32_t epoch;
} batch_object;

typedef struct message_object {
	PyObject_HEAD
	consumer_object *consumer;
	batch_object *batch;  /* NULL: taken singly; the body is in shared memory */
	PyObject *body;       /* bytes, or NULL if nobody asked for them yet */
	PyObject *properties; /* a mapping; until somebody asks for it, bytes, or NULL: in the batch */
	shmq_message message;
	uint32_t epoch;
	uint32_t index;   /* in the batch */
	uint32_t exports; /* number of live buffers */
	bool pinned;
	bool settled; /* finished, requeued or lost; with a batch, batch->settled counts instead */
} message_object;

/* ---- calling the core ----------------------------------------------------------------------- */

/* Make `call` once, without the GIL. `until` is `slice` from now, but not after `deadline`. */
#define CORE_WAIT(at, status, deadline, slice, call)                                               \
	do {                                                                                           \
		broker_object *entered = broker_enter(at);                                                 \
                                                                                                   \
		Py_BEGIN_ALLOW_THREADS                                                                     \
		int64_t until = earlier(deadline, shmq_now() + (slice));                                   \
		(void)until;                                                                               \
		(status) = (call);                                                                         \
		Py_END_ALLOW_THREADS                                                                       \
		broker_leave(entered);                                                                     \
	} while (0)

/* Repeat `call`, whose time limit is named `until`, until it gets its locks: first a try with the
 * GIL, then waits without it. CORE_RAISED if a signal handler raised; nothing was done then. */
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

/* The same for calls that take long (disk, repair, many messages): never with the GIL. */
#define CORE_CALL_SLOWLY(at, status, call)                                                         \
	do {                                                                                           \
		CORE_WAIT(at, status, FOR_EVER, LOCK_SLICE_NS, call);                                      \
		if ((status) == SHMQ_AGAIN && PyErr_CheckSignals() < 0)                                    \
			(status) = CORE_RAISED;                                                                \
	} while ((status) == SHMQ_AGAIN)

/* The progress of an operation that may have to be tried again. */
typedef struct attempt {
	int64_t timeout;   /* ns to wait for messages or room; FOR_EVER */
	int64_t deadline;  /* CLOCK_MONOTONIC ns; 0: it has not waited yet */
	int64_t since;     /* when it began to wait for room; 0: it has not; FOR_EVER: that was said */
	uint32_t missing;  /* number of segments that were gone when they were to be mapped */
	uint32_t backlogs; /* number of requests for a backlog queue */
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
/* Returns true if there is time left to wait. */
bool attempt_waits(attempt *a);

/* ---- errors.c ------------------------------------------------------------------------------- */

int errors_take(module_state *state);
/* Raise "<tried>: <the status's sentence>; <hint>". hint NULL: the status's usual one. Returns
 * NULL. For CORE_RAISED the exception that is set stays. */
PyObject *raise_status(module_state *state, int status, const char *hint, const char *tried, ...);

/* ---- results.c ------------------------------------------------------------------------------ */

void id_hex(uint64_t id, char *text); /* 16 digits, no terminator */
PyObject *id_str(uint64_t id);
PyObject *list_of(uint32_t count, PyObject *(*item)(const void *array, uint32_t i),
                  const void *array);
PyObject *list_of_numbers(const uint32_t *numbers, uint32_t count);
/* Messages as bytes objects in Arrow's layout, for the core to fill in. */
enum { COLUMN_IDS, COLUMN_TIMESTAMPS, COLUMN_ATTEMPTS, COLUMN_OFFSETS, COLUMN_DATA, COLUMNS };
typedef struct columns {
	PyObject *bytes[COLUMNS];
	shmq_columns at; /* where each begins */
} columns;
int columns_new(columns *self, uint32_t count, uint64_t data_bytes);
/* Cut the room for bodies off that the last offset leaves unused. Returns 0, or -1 with MemoryError. */
int columns_shorten(columns *self, uint32_t count);
void columns_free(columns *self);

/* ---- types ---------------------------------------------------------------------------------- */

module_state *state_of(PyTypeObject *type); /* works for subclasses made in Python too */
PyObject *type_new(PyTypeObject *type, PyObject *args, PyObject *kwargs);
/* Raise RuntimeError if __init__ was called twice, or was not called. Returns false if so. */
bool init_first(bool called, const char *type);
bool init_called(bool called, const char *type);
void object_free(PyObject *self); /* end of a dealloc: free the memory, drop the type */
/* The value of a constant of the core, by its name without SHMQ_. */
uint32_t constant_of(const char *name);

/* broker_type.c */
bool broker_usable(broker_object *self, const char *tried);
/* Post a request to the supervisor and wait for its answer. Returns that, SHMQ_TIMEOUT,
 * SHMQ_NOT_RUNNING or CORE_RAISED. */
int broker_ask(broker_object *self, enum shmq_request_kind kind, const char *topic,
               const char *channel, int64_t deadline);
/* Returns CORE_STOPPED for SHMQ_GONE if the instance was stopped, else `status`. */
int broker_gone(broker_object *self, int status);
/* After SHMQ_NEED_MAP: open and map the missing segment. Returns true if the call should be tried
 * again, false if an exception is set. */
bool broker_map_missing(broker_object *self, attempt *a);
/* Open a segment's file by the broker's opener. Returns -1 with an exception. */
int broker_open_segment(broker_object *self, uint64_t serial);
/* Wait for the answer to a request, and end it. Returns the status, CORE_RAISED. */
int request_await(broker_object *self, uint32_t ticket, int64_t deadline);
/* Raise what request_answer returned: `words` name what was requested. */
PyObject *request_raise(broker_object *self, int status, const char *words, const char *topic,
                        const char *channel);
/* Call on_forked(), which returns a new broker and the two numbers that a handle is opened with. */
int forked_call(module_state *state, PyObject *on_forked, broker_object **broker, uint64_t *first,
                uint64_t *second);

/* Repeat an operation of the broker until it gets its locks and its segments are mapped. `call` may
 * use `self->handle` and `until`. */
#define BROKER_CALL(self, status, call)                                                            \
	BROKER_LOOP(self, status, CORE_CALL_SLOWLY(self, status, call))
/* The same for the supervisor's loops, which have other queues to serve: if a lock is still held
 * after one slice, the status stays SHMQ_AGAIN, which raises Busy. */
#define BROKER_TRY(self, status, call)                                                             \
	BROKER_LOOP(self, status, CORE_WAIT(self, status, FOR_EVER, LOCK_SLICE_NS / 4, call))
#define BROKER_LOOP(self, status, once)                                                            \
	do {                                                                                           \
		attempt mapping = {0};                                                                     \
                                                                                                   \
		do {                                                                                       \
			if (!broker_usable(self, "use the broker"))                                            \
				(status) = CORE_RAISED;                                                            \
			else                                                                                   \
				once;                                                                              \
			if ((status) == SHMQ_NEED_MAP && !broker_map_missing(self, &mapping))                  \
				(status) = CORE_RAISED;                                                            \
		} while ((status) == SHMQ_NEED_MAP);                                                       \
	} while (0)

/*
 * Methods of Broker that are one call of the core.
 *   NONE_METHOD    the call may fail; the method returns None
 *   COUNT_METHOD   it may fail, or stores `count` of this type; the method returns that
 *   TELL_METHOD    it neither waits nor fails
 * how: BROKER_CALL or BROKER_TRY. tried, `...`: the text for raise_status, and its arguments.
 */
#define NONE_METHOD(name, parameters, how, call, ...)                                              \
	METHOD(broker, name, parameters, )                                                             \
	{                                                                                              \
		int status_;                                                                               \
                                                                                                   \
		how(self, status_, call);                                                                  \
		if (status_ != SHMQ_OK)                                                                    \
			return raise_status(self->state, status_, NULL, __VA_ARGS__);                          \
		Py_RETURN_NONE;                                                                            \
	}
#define COUNT_METHOD(name, parameters, type, how, call, ...)                                       \
	METHOD(broker, name, parameters, )                                                             \
	{                                                                                              \
		type count = 0;                                                                            \
		int status_;                                                                               \
                                                                                                   \
		how(self, status_, call);                                                                  \
		if (status_ != SHMQ_OK)                                                                    \
			return raise_status(self->state, status_, NULL, __VA_ARGS__);                          \
		return PyLong_FromUnsignedLongLong(count);                                                 \
	}
#define TELL_METHOD(name, parameters, call, tried)                                                 \
	METHOD(broker, name, parameters, )                                                             \
	{                                                                                              \
		if (!broker_usable(self, tried))                                                           \
			return NULL;                                                                           \
		call;                                                                                      \
		Py_RETURN_NONE;                                                                            \
	}

/* The methods of Broker and Producer that are in other files; X(name) declares or lists one. */
/* clang-format off */
#define SUPERVISOR_METHODS(X) \
	X(set_data_path) X(disk_trouble) X(supervise) X(supervisor_wait) X(scan_at) X(spiller_request) \
	X(spiller_pending) X(names_written) X(stopping) X(close_directory) X(next_request) X(answer) \
	X(create_topic) X(reserve_queue) X(create_queue) X(enter_queue) X(take_over) X(renamed) \
	X(remove_queue) X(erase_queue) X(trim) X(remove_topic) X(expire) X(sweep) X(dead_waiting) X(dead_postpone) \
	X(stage_oldest) X(spill_begin) X(chunk_begin) \
	X(chunk_load) X(chunk_depth) X(restore) X(disk_adopt) X(disk_set) X(evict_read_ahead) X(pump) \
	X(adopt) X(rebuild) X(audit) X(reap_scan) X(reap_spare) X(reap)
#define LEASE_METHODS(X) \
	X(lease_holder_open) X(lease_holder_touch) X(lease_holder_adopt) X(lease_holder_close) \
	X(lease_holder_leave) \
	X(lease_take) X(lease_look) \
	X(lease_list) X(lease_finish) X(lease_return) X(lease_end) X(lease_wait) X(lease_open) \
	X(lease_read) X(lease_properties)
#define STORE_METHODS(X) \
	X(find_store) X(request_store) X(reserve_store) X(create_store) X(enter_store) X(remove_store)
#define PRODUCER_METHODS(X) \
	X(publish_fixed) X(publish_arrow) X(publish_arrow_stream) X(publish_once) X(mark)
#define WIRE_METHODS(X) X(publish_framed) X(publish_run)
#define X(name) FASTCALL_FUNCTION(broker_##name);
SUPERVISOR_METHODS(X) LEASE_METHODS(X) STORE_METHODS(X)
#undef X
#define X(name) FASTCALL_FUNCTION(producer_##name);
PRODUCER_METHODS(X) WIRE_METHODS(X)
#undef X
		/* clang-format on */

		typedef PyObject native_object; /* `self` of a function is the module */
FASTCALL_FUNCTION(native_scan_bodies);
FASTCALL_FUNCTION(native_reopen_store);

/* properties.c */
FASTCALL_FUNCTION(native_pack_properties);
FASTCALL_FUNCTION(native_unpack_properties);
FASTCALL_FUNCTION(native_record_properties);
FASTCALL_FUNCTION(native_split_body);
/* Two bytes objects for the offsets and the blocks of `count` messages' properties. Returns a tuple,
 * and where the core is to write. */
PyObject *blocks_new(uint32_t count, uint64_t size, shmq_blocks *to);
FASTCALL_FUNCTION(native_encode_slot);
/* Write a mapping, or None, as a block. Returns 0, or -1 with an exception. */
int properties_pack(module_state *state, PyObject *mapping, uint8_t block[SHMQ_PROPERTIES_MOST],
                    uint64_t *length);
/* Returns a read-only mapping of str to bytes. */
PyObject *properties_unpack(module_state *state, const void *block, uint64_t length);
typedef struct property_blocks {
	PyObject *keep;    /* the bytes that they point into */
	shmq_body *blocks; /* NULL: no message has properties */
} property_blocks;
/* packed: None, one block as bytes for all n messages, or a sequence of n. Returns 0, or -1 with an
 * exception. */
int property_blocks_open(property_blocks *self, PyObject *packed, Py_ssize_t n);
void property_blocks_close(property_blocks *self);

/* spill_type.c */
/* Make room for up to n messages, with due times if it is for a chunk. Returns false with
 * MemoryError. */
bool spill_room(shmq_spill *spill, uint32_t queue, uint32_t n, bool chunk);
void spill_room_free(shmq_spill *spill);
/* Takes over the room. */
PyObject *spill_new(broker_object *broker, shmq_spill *spill);

/* producer_type.c */
bool producer_usable(producer_object *self);
/* Publish, and wait up to `timeout` for room. large: copy the bodies without the GIL. Returns 0, or
 * -1 with an exception. */
int producer_put(producer_object *self, const shmq_body *bodies, uint32_t n, bool large,
                 const shmq_terms *terms, int64_t timeout, uint64_t *first_id);
/* The CLOCK_REALTIME ns at which a message is due that is deferred for `defer` ns; 0: at once. */
static inline int64_t due_after(int64_t defer)
{
	return defer ? later_by(shmq_realtime(), defer) : 0;
}

/* The terms of messages that are deferred for `defer` ns and live for `ttl` ns from then on; 0: for
 * ever. */
static inline shmq_terms terms_after(int64_t defer, int64_t ttl)
{
	shmq_terms terms = {.due = due_after(defer)};

	if (ttl)
		terms.expires = later_by(terms.due ? terms.due : shmq_realtime(), ttl);
	return terms;
}

#define BODIES_ON_STACK 256
/* Room for n bodies: `stack`, or memory for PyMem_Free. Returns NULL with MemoryError. */
shmq_body *bodies_new(shmq_body stack[BODIES_ON_STACK], Py_ssize_t n);
/* Returns true if one of them is to be copied without the GIL. */
bool bodies_large(const shmq_body *bodies, uint32_t n);
/* Do what `status` asks for before the next try. Returns true if the call should be tried again,
 * false if an exception is set. */
bool producer_retry(producer_object *self, attempt *a, int status);

/* producer_methods.c */
/* Bodies in a buffer, and a second buffer to find them with: offsets, or a command line. */
typedef struct body_source {
	Py_buffer data, where;
	shmq_body *bodies, stack[BODIES_ON_STACK];
	uint32_t count;
} body_source;
/* Get the buffers; where: NULL if there is none. Returns 0, or -1 with an exception. */
int source_open(body_source *source, PyObject *data, PyObject *where);
/* Make room for bodies. Returns false with MemoryError. */
bool source_room(body_source *source, uint32_t count);
/* Publish source->count bodies if they are `good`, else an exception is set; then close the source.
 * Returns 0, or -1 with an exception. */
int source_publish(body_source *source, producer_object *producer, bool good,
                   const shmq_terms *terms, int64_t timeout, uint64_t *first_id);

/* wire_methods.c */
/* Find the bodies of the PUB commands at the start of the input, or of the MPUB there, whose line
 * is source->where: source->count of them. answers: the commands; used: their bytes. */
void wire_run(body_source *source, shmq_wire_input *in, uint64_t *used, uint32_t *answers);

/* loan_type.c */
/* block: its properties as bytes, or NULL; a reference that is taken over. */
PyObject *loan_new(producer_object *producer, uint64_t length, PyObject *block, int64_t defer,
                   int64_t timeout, bool zero);
/* Cancel the loans that were dropped while a lock was held elsewhere. last: there is no later call,
 * so wait for the lock, and leave to the reaper what it does not give up. */
void loans_pending(producer_object *producer, bool last);

/* consumer_type.c */
bool consumer_usable(consumer_object *self);
enum settle {
	SETTLE_FINISH,
	SETTLE_REQUEUE,
	SETTLE_TOUCH,
	SETTLE_RETRY,   /* delay: not used */
	SETTLE_RELEASE, /* as a requeue that is no failure */
	SETTLE_REJECT   /* delay: for which the supervisor leaves the messages to the caller */
};
/* Call shmq_finish, _requeue and so on for messages that were taken in `epoch`. */
int consumer_settle(consumer_object *self, uint32_t epoch, enum settle what, const shmq_message *m,
                    uint32_t n, int64_t delay, uint8_t *ok);
PyObject *settle_raise(consumer_object *self, int status, enum settle what, uint32_t epoch,
                       uint32_t n, uint32_t lost, uint64_t first);
void consumer_unpin(consumer_object *self, const shmq_message *m, uint32_t epoch);
void unpin_pending(consumer_object *self);
/* Tell whoever watches for messages that there was nothing to take. Returns 0, or -1 with an
 * exception. */
int beacon_tell(PyObject *beacon);
/* If an exception is set, the caller never learns of these messages, which were just taken: give
 * them back, as ones that have not failed. */
void consumer_untake(consumer_object *self, const shmq_message *messages, uint32_t n);

/* Returns true if the error of a rejection is a str or None; else false with TypeError. */
bool error_is_text(PyObject *error);
/* How requeue(delay, failed) settles: *delay is set to 0 if it is `BY_POLICY`. */
#define BY_POLICY INT64_C(-1)
enum settle settle_of_requeue(int64_t *delay, bool failed);
/* After messages were rejected: move them to the dead topic now, so that their error, a str or None,
 * is kept. The supervisor moves later what this cannot. Returns 0, or -1 with an exception. */
int settle_bury(consumer_object *self, const shmq_message *m, uint32_t n, PyObject *error);
/* How long the supervisor leaves rejected messages to settle_bury. */
#define BURY_NS (2 * INT64_C(1000000000))

/* message_type.c */
#define BODY_COPIED 4096u /* longest body that is copied when the message is taken */
/* Returns NULL without an exception if the message was lost before its body was copied. */
PyObject *message_new(consumer_object *consumer, const shmq_message *m);
PyObject *message_of_batch(batch_object *batch, uint32_t index);
/* The message is no longer in flight to its consumer. */
void message_settled(message_object *self);

/* batch_type.c */
/* A Batch of n > 0 messages just taken. Returns NULL without an exception if all were lost. */
PyObject *batch_new(consumer_object *consumer, const shmq_message *messages, uint32_t n);
/* A Batch of no messages and no consumer. */
PyObject *batch_empty(PyTypeObject *type);
void batch_settled(batch_object *batch, uint32_t index);
/* The block of the offsets and bodies, for an empty batch too; borrowed. Returns NULL with an
 * exception. */
PyObject *batch_block(batch_object *batch);

/* batch_arrow.c */
FASTCALL_FUNCTION(batch___arrow_c_array__);
FASTCALL_FUNCTION(batch___arrow_c_stream__);
FASTCALL_FUNCTION(batch_import_arrow);

/* waiter_type.c */
void waiters_wake(broker_object *broker);

/* lanes_type.c */
void lanes_wake_all(broker_object *broker);
/* A message of a lane was finished or requeued: a thread may wait for that. */
void lanes_settled(lanes_object *self);

#define X(name) extern PyType_Spec name##_spec;
TYPES(X)
#undef X

/* Rows of tables; their names say which docstring they have. */
#define METHOD_ROW(owner, Class, name, flags)                                                      \
	{#name, (PyCFunction)(void (*)(void))owner##_##name, flags, DOC_##Class##_##name}
#define FAST (METH_FASTCALL | METH_KEYWORDS)
#define TYPE_SPEC(owner, Class, more_flags)                                                        \
	PyType_Spec owner##_spec = {.name = "shmq._native." #Class,                                    \
	                            .basicsize = sizeof(owner##_object),                               \
	                            .flags = Py_TPFLAGS_DEFAULT | (more_flags),                        \
	                            .slots = owner##_slots}
#define GETTER_ROW(owner, Class, name)                                                             \
	{#name, (getter)(void (*)(void))owner##_##name, NULL, DOC_##Class##_##name, NULL}
#define MEMBER_ROW(owner, Class, name, type, field)                                                \
	{#name, type, offsetof(owner##_object, field), READONLY, DOC_##Class##_##name}

#endif
