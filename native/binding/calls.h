/*
 * Calling the core. A call first tries its locks with the GIL held, because they are nearly always
 * free. If a lock is held elsewhere (SHMQ_AGAIN), the GIL is released and the call is repeated in
 * slices, with a check for signals after each slice. Ctrl-C and other threads therefore keep
 * working even if the holder of the lock is stopped. CORE_CALL does this; CORE_WAIT is one call
 * without the GIL.
 *
 * The ..._retry functions do what any other status asks of the caller: map a segment, wait for
 * room, attach again after a fork. An operation is a loop around one CORE_CALL and one of them.
 */
#ifndef SHMQ_BINDING_CALLS_H
#define SHMQ_BINDING_CALLS_H

#include "objects.h"

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

/* ---- calls.c -------------------------------------------------------------------------------- */

bool broker_usable(broker_object *self, const char *tried);
/* Returns CORE_STOPPED for SHMQ_GONE if the instance was stopped, else `status`. */
int broker_gone(broker_object *self, int status);
/* Returns true if there is time left to wait. */
bool attempt_waits(attempt *a);
/* After SHMQ_NEED_MAP: open and map the missing segment of `handle`. leaving: it is the caller's
 * alone, which is about to close it. Otherwise it is the broker's, and another thread may detach that
 * whenever Python code runs. Returns true if the call should be tried again, false if an exception
 * is set. */
bool broker_map_for(broker_object *self, shmq_broker *handle, bool leaving, attempt *a);
/* The same for the broker's handle: open and map the missing segment. */
bool broker_map_missing(broker_object *self, attempt *a);
/* Open a segment's file by the broker's opener. Returns -1 with an exception. */
int broker_open_segment(broker_object *self, uint64_t serial);
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
/* Enter an object, whose `sleeper` is filled in, in its broker's list, or take it out. */
void sleeper_enter(broker_object *broker, sleeper *self);
void sleeper_leave(broker_object *broker, sleeper *self);

/* ---- broker_type.c -------------------------------------------------------------------------- */

/* Post a request to the supervisor and wait for its answer. Returns that, SHMQ_TIMEOUT,
 * SHMQ_NOT_RUNNING or CORE_RAISED. */
int broker_ask(broker_object *self, enum shmq_request_kind kind, const char *topic,
               const char *channel, int64_t deadline);
/* Wait for the answer to a request, and end it. Returns the status, CORE_RAISED. */
int request_await(broker_object *self, uint32_t ticket, int64_t deadline);
/* Raise what request_answer returned: `words` name what was requested. */
PyObject *request_raise(broker_object *self, int status, const char *words, const char *topic,
                        const char *channel);

/* ---- settle.c ------------------------------------------------------------------------------- */

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

/* ---- producer_calls.c ----------------------------------------------------------------------- */

bool producer_usable(producer_object *self);
/* Do what `status` asks for before the next try. Returns true if the call should be tried again,
 * false if an exception is set. */
bool producer_retry(producer_object *self, attempt *a, int status);
/* Cancel the loans that were dropped while a lock was held elsewhere. last: there is no later call,
 * so wait for the lock, and leave to the reaper what it does not give up. */
void loans_pending(producer_object *producer, bool last);
void loan_handle_free(producer_object *producer, shmq_loan *handle);

#endif
