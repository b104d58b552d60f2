/*
 * The objects of the extension, and its state. The binding knows <Python.h> (Limited API 3.11) and the
 * headers of native/include, and nothing of core/.
 *
 * Lifetime. A handle of the core lives as long as its Python object, so a thread that is inside a
 * call without the GIL always has a valid one. close() only makes the object unusable.
 */
#ifndef SHMQ_BINDING_OBJECTS_H
#define SHMQ_BINDING_OBJECTS_H

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

/* An object of a broker that detach wakes, if a thread waits with it. */
typedef struct sleeper {
	struct sleeper *next;
	void (*wake)(void *self);
	void *self; /* borrowed: it leaves the list when it is freed */
} sleeper;

typedef struct broker_object {
	OBJECT_HEAD
	shmq_broker *handle;
	PyObject *opener;
	PyObject *instance; /* str, for error messages */
	sleeper *sleepers;
	uint32_t active; /* threads that are in the core without the GIL */
	bool closed;     /* detach was called */
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
	PyObject *members; /* dict: the consumers, in the order in which they came */
	PyObject *retired; /* list of those that left while a thread was inside; NULL: none */
	PyObject *beacon;  /* as of consumer_object */
	sleeper sleeper;
	uint32_t *weights; /* one for each level */
	uint32_t levels, max_in_flight;
	uint32_t inside;     /* threads that are in the core without the GIL */
	uint32_t generation; /* of the process that opened the handle */
	uint64_t names;      /* the directory's generation that the subclass was told of */
	bool strict, follows;
	bool hearing; /* the subclass is being told */
	bool closed;
} lanes_object;

/* In a forked child the handle is the parent's, and another thread may have had its mutex. */
static inline bool lanes_stale(const lanes_object *self)
{
	return self->generation != shmq_fork_generation();
}

typedef struct waiter_object {
	OBJECT_HEAD
	broker_object *broker;
	shmq_waiter *handle;
	sleeper sleeper;
	bool waiting; /* a thread is in shmq_waiter_wait */
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

#endif
