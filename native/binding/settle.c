/* The end of messages that were taken: finish, requeue and the rest, pins, copies for a dead topic. */
#include "types.h"

/* ---- pins to give back ---------------------------------------------------------------------- */

/* Called where the GIL must be kept (a buffer or a message is freed), so if a lock is held
 * elsewhere the pin is given back later. */
void consumer_unpin(consumer_object *self, const shmq_message *m, uint32_t epoch)
{
	pending_unpin *pending;

	if (epoch != self->epoch || self->broker->closed)
		return; /* it is the parent's, or detach gave it back */
	if (shmq_unpin(self->handle, m, 0) != SHMQ_AGAIN)
		return;
	pending = PyMem_Malloc(sizeof(*pending));
	if (!pending) {
		shmq_unpin(self->handle, m, shmq_now() + LOCK_SLICE_NS);
		return;
	}
	*pending = (pending_unpin){self->pending, *m};
	self->pending = pending;
}

void unpin_pending(consumer_object *self)
{
	pending_unpin *list = self->pending, *next;

	self->pending = NULL;
	for (; list; list = next) {
		next = list->next;
		consumer_unpin(self, &list->message, self->epoch);
		PyMem_Free(list);
	}
}

/* ---- finish, requeue, touch ----------------------------------------------------------------- */

/* A message of a lane was finished or requeued: a thread may wait for that. */
static void lanes_settled(lanes_object *self)
{
	if (!lanes_stale(self) && !self->closed && !self->broker->closed)
		shmq_lanes_settled(self->handle);
}

int consumer_settle(consumer_object *self, uint32_t epoch, enum settle what, const shmq_message *m,
                    uint32_t n, int64_t delay, uint8_t *ok)
{
	int status = SHMQ_NOT_IN_FLIGHT;

	if (UNLIKELY(epoch != self->epoch || self->closed || self->broker->closed))
		return SHMQ_NOT_IN_FLIGHT; /* they are the parent's, or close gave them back */
	switch (what) {
	case SETTLE_FINISH:
		CORE_CALL(self->broker, status, shmq_finish(self->handle, m, n, ok, until));
		break;
	case SETTLE_REQUEUE:
		CORE_CALL(self->broker, status, shmq_requeue(self->handle, m, n, delay, ok, until));
		break;
	case SETTLE_TOUCH:
		CORE_CALL(self->broker, status, shmq_touch(self->handle, m, n, ok, until));
		break;
	case SETTLE_RETRY:
		CORE_CALL(self->broker, status, shmq_retry(self->handle, m, n, ok, until));
		break;
	case SETTLE_RELEASE:
		CORE_CALL(self->broker, status, shmq_release(self->handle, m, n, delay, ok, until));
		break;
	case SETTLE_REJECT:
		CORE_CALL(self->broker, status, shmq_reject(self->handle, m, n, delay, ok, until));
		break;
	}
	if (UNLIKELY(self->lanes != NULL) && what != SETTLE_TOUCH)
		lanes_settled(self->lanes);
	return status == SHMQ_FORKED || status == SHMQ_CLOSED ? SHMQ_NOT_IN_FLIGHT : status;
}

bool error_is_text(PyObject *error)
{
	if (error == Py_None || PyUnicode_Check(error))
		return true;
	PyErr_Format(PyExc_TypeError, "error must be a str or None, not %R; try str(error)", error);
	return false;
}

enum settle settle_of_requeue(int64_t *delay, bool failed)
{
	bool by_policy = *delay == BY_POLICY;

	if (by_policy)
		*delay = 0;
	return !failed ? SETTLE_RELEASE : by_policy ? SETTLE_RETRY : SETTLE_REQUEUE;
}

PyObject *settle_raise(consumer_object *self, int status, enum settle what, uint32_t epoch,
                       uint32_t n, uint32_t lost, uint64_t first)
{
	static const char *const verbs[] = {"finish",  "requeue", "touch",
	                                    "requeue", "requeue", "reject"};
	const char *hint = NULL;
	char id[17] = "";

	id_hex(first, id);
	status = broker_gone(self->broker, status);
	if (epoch != self->epoch || (self->broker->handle && shmq_broker_forked(self->broker->handle)))
		hint = "the parent process took it, only that one can settle it";
	else if (self->closed || self->broker->closed)
		hint = "the consumer was closed, which gave it back to the channel";
	else if (status == SHMQ_BAD_NAME) /* of the dead topic */
		hint = shmq_error_detail();
	if (n == 1)
		return raise_status(self->state, status, hint, "%s message %s of '%U/%U'", verbs[what], id,
		                    self->topic, self->channel);
	if (!lost)
		return raise_status(self->state, status, hint, "%s %u messages of '%U/%U'", verbs[what], n,
		                    self->topic, self->channel);
	return raise_status(self->state, status, hint,
	                    "%s %u messages of '%U/%U', of which %u failed (the first: %s)",
	                    verbs[what], n, self->topic, self->channel, lost, id);
}

/* Find the dead topic, which is made with a channel if there is none. */
static int bury_target(broker_object *broker, const char *name, int64_t deadline,
                       shmq_dead_target *to)
{
	int status = shmq_topic_find(broker->handle, name, &to->topic, &to->generation);

	if (status != SHMQ_GONE)
		return status;
	status = broker_ask(broker, SHMQ_CREATE_CHANNEL, name, "dead", deadline);
	return status ? status : shmq_topic_find(broker->handle, name, &to->topic, &to->generation);
}

int settle_bury(consumer_object *self, const shmq_message *m, uint32_t n, PyObject *error)
{
	int64_t deadline = shmq_now() + BURY_NS / 2;
	broker_object *broker = self->broker;
	shmq_dead_target to = {0};
	shmq_consumer_info info;
	Py_ssize_t length = 0;
	uint32_t moved;
	char name[80];
	int status;

	if (error != Py_None) {
		to.error = PyUnicode_AsUTF8AndSize(error, &length);
		if (!to.error)
			return -1;
		to.error_length = length < UINT16_MAX ? (uint32_t)length : UINT16_MAX;
	}
	shmq_consumer_get_info(self->handle, &info);
	BROKER_CALL(broker, status,
	            shmq_dead_topic(broker->handle, info.queue, info.serial, until, name));
	if (status == SHMQ_OK)
		status = bury_target(broker, name, deadline, &to);
	if (status == SHMQ_OK)
		BROKER_CALL(broker, status,
		            shmq_dead_move(broker->handle, info.queue, info.serial, &to,
		                           &(shmq_dead_wish){.messages = m, .n = n}, until, &moved));
	if (status == SHMQ_NEED_BACKLOG &&
	    !broker_ask(broker, SHMQ_CREATE_BACKLOG, name, NULL, deadline))
		BROKER_CALL(broker, status,
		            shmq_dead_move(broker->handle, info.queue, info.serial, &to,
		                           &(shmq_dead_wish){.messages = m, .n = n}, until, &moved));
	return PyErr_Occurred() ? -1 : 0;
}
