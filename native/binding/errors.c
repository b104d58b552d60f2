#include "module.h"

#include <stdarg.h>
#include <string.h>

/* What to do about it, unless the one who raises knows better. */
static const char *hint_of(int status)
{
	switch (status) {
	case SHMQ_FULL:
		return "add consumers, wait longer (timeout=) or raise mem_queue_size";
	case SHMQ_BAD_NAME:
		return "use 1 to 64 of . a-z A-Z 0-9 _ -, with #ephemeral at the end if wanted";
	case SHMQ_NOT_IN_FLIGHT:
		return "it timed out, or was finished, requeued or emptied already";
	case SHMQ_GONE:
		return "create it again, then make a new producer or consumer";
	case SHMQ_LAYOUT:
		return "use the version that made it, or let that one empty it (shmq serve --drain)";
	case SHMQ_TOO_MANY_CLIENTS:
		return "close brokers that are not needed, and share one a process";
	case SHMQ_NOT_RUNNING:
		return "start one with `shmq serve --instance NAME`";
	case SHMQ_NO_MEMORY:
		return "raise the limit (ulimit -v, the container's memory)";
	case SHMQ_NO_SPACE:
		return "enlarge /dev/shm (docker run --shm-size=...) or lower mem_queue_size";
	case SHMQ_TABLE_FULL:
		return "delete topics or channels that are not needed";
	case SHMQ_CLOSED:
		return "make a new one";
	case CORE_STOPPED:
		return "attach again when it runs; what was not finished is handed out then";
	case SHMQ_CORRUPT:
		return "stop the instance with `shmq serve --drain` and start it again";
	case SHMQ_AGAIN:
		return "try again when its holder goes on";
	case SHMQ_FORKED:
		return "attach again in the child process";
	case SHMQ_LEASE_LOST:
		return "its messages are in the queue again, or were finished";
	case SHMQ_LEASE_FENCED:
		return "give each reader a name of its own, or end the other one";
	case SHMQ_TIMEOUT:
		return "the supervisor lives but has not answered; look at its log";
	}
	return "";
}

static bool has_why(int status)
{
	switch (status) {
	case SHMQ_TOO_BIG:
	case SHMQ_LAYOUT:
	case SHMQ_NOT_RUNNING:
	case SHMQ_NO_MEMORY:
	case SHMQ_NO_SPACE:
	case SHMQ_INVALID:
	case SHMQ_TABLE_FULL:
	case SHMQ_CORRUPT:
		return true;
	}
	return false;
}

PyObject *raise_status(module_state *state, int status, const char *hint, const char *tried, ...)
{
	const char *why = has_why(status) ? shmq_why() : "";
	const char *sentence = status == CORE_STOPPED ? "the broker was stopped"
	                                              : shmq_status_sentence(status);
	PyObject *what, *message;
	va_list list;

	if (status == CORE_RAISED)
		return NULL;
	if (!hint)
		hint = hint_of(status);
	va_start(list, tried);
	what = PyUnicode_FromFormatV(tried, list);
	va_end(list);
	if (!what)
		return NULL;
	message = PyUnicode_FromFormat("%U: %s%s%s%s%s", what, sentence,
	                               *why ? ": " : "", why, *hint ? "; " : "", hint);
	if (status == CORE_STOPPED)
		status = SHMQ_GONE;
	if (message)
		PyErr_SetObject(status <= 0 && status > -STATUSES ? state->exceptions[-status]
		                                                  : state->error,
		                message);
	Py_DECREF(what);
	Py_XDECREF(message);
	return NULL;
}

/* ---- the classes ---------------------------------------------------------------------------- */

enum also { NOTHING, VALUE_ERROR, QUEUE_FULL };

static const struct {
	const char *name, *doc;
	enum also also; /* its other base */
} classes[] = {
	{"NotRunning", "No supervisor is running.", NOTHING},
	{"Full", "There is no room for the message, and none came in time.", QUEUE_FULL},
	{"MessageTooBig", "The message or batch can never fit.", VALUE_ERROR},
	{"BadName", "Not a valid topic or channel name.", VALUE_ERROR},
	{"BadArgument", "An argument is out of range.", VALUE_ERROR},
	{"NotInFlight", "The message is not in flight to this consumer (any more).", NOTHING},
	{"Gone", "The topic, channel or broker was deleted or stopped, or the handle closed.", NOTHING},
	{"LayoutMismatch", "The segment was not made by this version of shmq.", NOTHING},
	{"TooManyClients", "Every client entry is taken.", NOTHING},
	{"LeaseLost", "The lease is not held any more: its time was over, or it was ended.", NOTHING},
	{"LeaseFenced", "Somebody else leases under this name now.", NOTHING},
	{"Busy", "A lock is held by a stopped process; internal.", NOTHING},
	{"Forked", "The handle is the parent's; internal.", NOTHING},
	{"NeedBacklog", "The topic has no queue to publish to yet; internal.", NOTHING},
};
#define CLASSES (sizeof(classes) / sizeof(*classes))
#define INTERNAL 3

/* So that code written for queue.Queue or multiprocessing.Queue finds its exception. */
static PyObject *queue_full(void)
{
	PyObject *queue = PyImport_ImportModule("queue");
	PyObject *full = queue ? PyObject_GetAttrString(queue, "Full") : NULL;

	Py_XDECREF(queue);
	return full;
}

static PyObject *class_bases(module_state *state, enum also also)
{
	PyObject *full, *bases;

	if (also == NOTHING)
		return PyTuple_Pack(1, state->error);
	if (also == VALUE_ERROR)
		return PyTuple_Pack(2, state->error, PyExc_ValueError);
	full = queue_full();
	bases = full ? PyTuple_Pack(2, state->error, full) : NULL;
	Py_XDECREF(full);
	return bases;
}

static PyObject *class_new(module_state *state, unsigned k)
{
	bool internal = k >= CLASSES - INTERNAL;
	PyObject *bases = class_bases(state, classes[k].also);
	PyObject *class = NULL;
	char name[64];

	if (bases) {
		PyOS_snprintf(name, sizeof(name), "%s.%s", internal ? "shmq._native" : "shmq",
		              classes[k].name);
		class = PyErr_NewExceptionWithDoc(name, classes[k].doc, bases, NULL);
		Py_DECREF(bases);
	}
	return class;
}

int errors_add(PyObject *module, module_state *state)
{
	static const struct {
		int status;
		const char *exception;
	} rows[] = {
#define X(name, value, exception, sentence)                                                        \
	{value, SHMQ_##name == SHMQ_FORKED         ? "Forked"                                          \
	        : SHMQ_##name == SHMQ_NEED_BACKLOG ? "NeedBacklog"                                     \
	                                           : exception},
		SHMQ_STATUS_TABLE(X)
#undef X
	};

	state->error = PyErr_NewExceptionWithDoc("shmq.ShmqError", "What every error of shmq is.", NULL,
	                                         NULL);
	if (!state->error || PyModule_AddObjectRef(module, "ShmqError", state->error) < 0)
		return -1;
	for (unsigned k = 0; k < CLASSES; k++) {
		PyObject *class = class_new(state, k);

		if (!class || PyModule_AddObjectRef(module, classes[k].name, class) < 0) {
			Py_XDECREF(class);
			return -1;
		}
		for (unsigned i = 0; i < STATUSES; i++) {
			if (strcmp(rows[i].exception, classes[k].name) == 0)
				state->exceptions[-rows[i].status] = Py_NewRef(class);
		}
		Py_DECREF(class);
	}
	for (unsigned i = 0; i < STATUSES; i++) {
		if (!state->exceptions[i])
			state->exceptions[i] = Py_NewRef(state->error);
	}
	return 0;
}
