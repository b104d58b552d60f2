/* The calls that every method of Producer, and its loans, make: a usable handle, the next try. */
#include "types.h"

#include <errno.h>
#include <string.h>
#include <sys/statvfs.h>

#define BACKLOGS_MAX 100 /* how often one publish asks for a backlog queue */

/* ---- loans to cancel ------------------------------------------------------------------------ */

void loan_handle_free(producer_object *producer, shmq_loan *handle)
{
	producer->loans--;
	shmq_loan_free(handle);
}

void loans_pending(producer_object *producer, bool last)
{
	pending_loan *list = producer->pending, *next;
	bool gone = last || producer->broker->closed;

	producer->pending = NULL;
	for (; list; list = next) {
		next = list->next;
		if (shmq_loan_cancel(list->loan, gone ? shmq_now() + LOCK_SLICE_NS : 0) != SHMQ_AGAIN ||
		    gone) {
			loan_handle_free(producer, list->loan);
			PyMem_Free(list);
		} else {
			list->next = producer->pending;
			producer->pending = list;
		}
	}
}

/* ---- try again ------------------------------------------------------------------------------ */

bool producer_usable(producer_object *self)
{
	if (LIKELY(self->handle && !self->closed && !self->broker->closed)) {
		if (UNLIKELY(self->pending != NULL))
			loans_pending(self, false);
		return true;
	}
	if (init_called(self->topic != NULL, "Producer"))
		raise_status(self->state, SHMQ_CLOSED, NULL, "publish to '%U'", self->topic);
	return false;
}

/* In a forked child: drop the parent's handle and open one of our own. */
static bool producer_reopen(producer_object *self)
{
	broker_object *broker;
	uint64_t topic, generation;
	uint32_t epoch = self->epoch;
	shmq_producer *handle;
	int status;

	if (forked_call(self->state, self->on_forked, &broker, &topic, &generation) < 0)
		return false;
	if (epoch != self->epoch) { /* another thread was faster */
		Py_DECREF((PyObject *)broker);
		return true;
	}
	BROKER_CALL(broker, status,
	            shmq_producer_open(broker->handle, (uint32_t)topic, (uint32_t)generation, &handle));
	if (status != SHMQ_OK) {
		raise_status(self->state, status, NULL, "open topic '%U' in a child process", self->topic);
		Py_DECREF((PyObject *)broker);
		return false;
	}
	if (!self->broker->active && !self->loans)
		shmq_producer_close(self->handle);
	Py_DECREF((PyObject *)self->broker);
	self->broker = broker;
	self->handle = handle;
	if (self->sealed)
		shmq_producer_seal(handle);
	self->epoch++;
	return true;
}

/* True if the file system of a directory can take no more files, however small. */
static bool no_names(const char *path)
{
	struct statvfs room;

	return !statvfs(path, &room) && room.f_files && !room.f_favail;
}

/* The reason why nothing makes room. Returns NULL if only the consumers are too slow. */
static const char *producer_hint(shmq_broker *broker, char *to, size_t size)
{
	char path[SHMQ_PATH_MOST];
	int error;

	if (!shmq_supervisor_alive(broker))
		return "the supervisor is dead, so nothing spills to disk: start it again "
			   "(`shmq serve`), or add consumers";
	error = shmq_disk_trouble(broker, path);
	if (!error)
		return NULL;
	if (error == ENOSPC || error == EDQUOT)
		PyOS_snprintf(to, size, "the data path %s is full: %s: %s", path, strerror(error),
		              error == ENOSPC && no_names(path) ? "no inodes are left there: remove files"
		                                                : "make room there");
	else if (error == ESTALE)
		PyOS_snprintf(to, size,
		              "the data path %s is not the directory that it was (moved, or its file "
		              "system unmounted): bring that one back under this name (mount, mv)",
		              path);
	else
		PyOS_snprintf(to, size,
		              "the supervisor cannot write to the data path %s: %s: mend that, it tries "
		              "again every second",
		              path, strerror(error));
	return to;
}

#define GIVES_ROOM "add consumers, %sor raise the limit, mem_queue_size or arena_size"

/* Raise Full: what was tried, which queue has no room, and what gives it. waits: the caller goes on
 * waiting, and only says so. */
static void producer_full(producer_object *self, int status, bool waits)
{
	char why[SHMQ_PATH_MOST + 256], queue[256] = "", text[sizeof(why) + sizeof(queue) + 16];
	const char *hint = NULL;
	shmq_broker *broker = self->broker->handle; /* NULL: it was detached just now */

	if (status == SHMQ_FULL) {
		if (broker && !*shmq_error_detail()) {
			hint = producer_hint(broker, why, sizeof(why));
			if (shmq_producer_lacks(self->handle, queue, sizeof(queue) - 2))
				strcat(queue, "; ");
		}
		if (!hint) {
			PyOS_snprintf(why, sizeof(why), GIVES_ROOM, waits ? "" : "wait longer (timeout=), ");
			hint = why;
		}
		PyOS_snprintf(text, sizeof(text), "%s%s", queue, hint);
		hint = text;
	}
	raise_status(self->state, status, hint, "publish to '%U'", self->topic);
}

/* Have it said, once in a wait, that the call waits for room. Returns false with an exception if a
 * handler of the log has raised one. */
static bool producer_waits(producer_object *self, attempt *a, int status)
{
	int64_t now = shmq_now();
	PyObject *type, *refused, *trace, *module, *said = NULL;

	if (!a->since)
		a->since = now;
	if (LIKELY(now < later_by(a->since, PATIENCE_NS)))
		return true;
	a->since = FOR_EVER;
	producer_full(self, status, true);
	PyErr_Fetch(&type, &refused, &trace);
	module = PyImport_ImportModule("shmq.patience");
	if (module)
		said = PyObject_CallMethod(module, "say", "O", refused ? refused : Py_None);
	Py_XDECREF(module);
	Py_XDECREF(type);
	Py_XDECREF(refused);
	Py_XDECREF(trace);
	Py_XDECREF(said);
	return said != NULL;
}

static bool producer_room(producer_object *self, attempt *a, int status)
{
	if (!attempt_waits(a)) {
		producer_full(self, status, false);
		return false;
	}
	if (UNLIKELY(!producer_waits(self, a, status)))
		return false;
	CORE_WAIT(self->broker, status, a->deadline ? a->deadline : FOR_EVER, WAIT_SLICE_NS,
	          shmq_producer_wait(self->handle, until));
	return PyErr_CheckSignals() == 0;
}

bool producer_retry(producer_object *self, attempt *a, int status)
{
	PyObject *made;

	switch (status) {
	case SHMQ_FULL:
	case SHMQ_NO_SPACE:
		return producer_room(self, a, status);
	case SHMQ_NEED_MAP:
		return broker_map_missing(self->broker, a);
	case SHMQ_NEED_BACKLOG:
		if (++a->backlogs > BACKLOGS_MAX || !self->on_backlog)
			break;
		made = PyObject_CallNoArgs(self->on_backlog);
		Py_XDECREF(made);
		return made != NULL;
	case SHMQ_FORKED:
		return producer_reopen(self);
	}
	raise_status(self->state, broker_gone(self->broker, status), NULL, "publish to '%U'",
	             self->topic);
	return false;
}
