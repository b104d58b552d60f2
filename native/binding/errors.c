#include "types.h"

#include <stdarg.h>

/* The advice that ends an error message, unless the caller of raise_status has a better one. */
static const char *const hints[STATUSES] = {
	[-SHMQ_FULL] = "add consumers, or raise the limit, mem_queue_size or arena_size",
	[-SHMQ_BAD_NAME] = "use 1 to 64 of . a-z A-Z 0-9 _ -, with #ephemeral at the end if wanted",
	[-SHMQ_NOT_IN_FLIGHT] = "it timed out, or was finished, requeued or emptied already",
	[-SHMQ_GONE] = "create it again, then make a new producer or consumer",
	[-SHMQ_LAYOUT] = "use the version that made it, or let that one empty it (shmq serve --drain)",
	[-SHMQ_NOT_READY] = "try again; if its creator died, start the broker again",
	[-SHMQ_TOO_MANY_CLIENTS] = "close brokers that are not needed, and share one a process",
	[-SHMQ_NOT_RUNNING] = "start one with `shmq serve --instance NAME`",
	[-SHMQ_NO_MEMORY] = "raise the limit (ulimit -v, ulimit -f, the container's memory)",
	[-SHMQ_NO_SPACE] = "enlarge /dev/shm (docker run --shm-size=...) or lower mem_queue_size",
	[-SHMQ_TABLE_FULL] = "delete topics, channels or results stores that are not needed",
	[-SHMQ_CLOSED] = "make a new one",
	[-SHMQ_CORRUPT] = "stop the instance with `shmq serve --drain` and start it again",
	[-SHMQ_AGAIN] = "try again when its holder goes on",
	[-SHMQ_FORKED] = "attach again in the child process",
	[-SHMQ_LEASE_LOST] = "its messages are in the queue again, or were finished",
	[-SHMQ_LEASE_FENCED] = "give each reader a name of its own, or end the other one",
	[-SHMQ_REJECTED] = "publish it later, add consumers, or raise the limit (shmq channel set)",
	[-SHMQ_STORE_FULL] =
			"delete keys, give them a ttl, or make the store larger (max_keys, max_bytes)",
	[-SHMQ_NO_NUMBER] = "count under another key, or delete this one",
	[-SHMQ_FOREIGN] =
			"share its PID namespace (docker run --pid=container:NAME "
			"--ipc=container:NAME; Kubernetes: shareProcessNamespace), see docs/containers.md",
	[-SHMQ_REFUSED] = "the supervisor's log has the rest",
	[-SHMQ_NOT_SEALED] =
			"what is there is unpickled, which runs code: use shmq.Queue or shmq.Executor in a "
			"process that may attach, or another topic",
	[-SHMQ_TIMEOUT] = "the supervisor lives but has not answered; look at its log",
};

/* The failures of which shmq_error_detail() knows more. */
static const bool has_detail[STATUSES] = {
	[-SHMQ_TOO_BIG] = true,    [-SHMQ_LAYOUT] = true,   [-SHMQ_NOT_RUNNING] = true,
	[-SHMQ_NO_MEMORY] = true,  [-SHMQ_NO_SPACE] = true, [-SHMQ_INVALID] = true,
	[-SHMQ_TABLE_FULL] = true, [-SHMQ_CORRUPT] = true,  [-SHMQ_NOT_READY] = true,
	[-SHMQ_FULL] = true,       [-SHMQ_REJECTED] = true, [-SHMQ_FOREIGN] = true,
	[-SHMQ_REFUSED] = true,
};

PyObject *raise_status(module_state *state, int status, const char *hint, const char *tried, ...)
{
	bool known = status <= 0 && status > -STATUSES, stopped = status == CORE_STOPPED;
	const char *why = known && has_detail[-status] ? shmq_error_detail() : "";
	const char *sentence = stopped ? "the broker was stopped" : shmq_status_sentence(status);
	PyObject *what, *message;
	va_list list;

	if (status == CORE_RAISED)
		return NULL;
	if (!hint && stopped)
		hint = "attach again when it runs; what was not finished is handed out then";
	if (!hint && status == SHMQ_TABLE_FULL && *why)
		hint = ""; /* who says which table is full says what to do */
	if (!hint)
		hint = known && hints[-status] ? hints[-status] : "";
	va_start(list, tried);
	what = PyUnicode_FromFormatV(tried, list);
	va_end(list);
	if (!what)
		return NULL;
	message = PyUnicode_FromFormat("%U: %s%s%s%s%s", what, sentence, *why ? ": " : "", why,
	                               *hint ? "; " : "", hint);
	if (stopped)
		status = SHMQ_GONE;
	if (message)
		PyErr_SetObject(known || stopped ? state->exceptions[-status] : state->error, message);
	Py_DECREF(what);
	Py_XDECREF(message);
	return NULL;
}

/* ---- the classes ---------------------------------------------------------------------------- */

int errors_take(module_state *state)
{
	static const struct {
		int status;
		const char *exception;
	} rows[] = {
#define X(name, value, exception, sentence) {value, exception},
		SHMQ_STATUS_TABLE(X)
#undef X
	};
	PyObject *errors = PyImport_ImportModule("shmq.errors");

	state->error = errors ? PyObject_GetAttrString(errors, "ShmqError") : NULL;
	for (unsigned i = 0; state->error && i < STATUSES; i++) {
		const char *name = *rows[i].exception ? rows[i].exception : "ShmqError";
		PyObject *class = PyObject_GetAttrString(errors, name);

		if (!class)
			break;
		state->exceptions[-rows[i].status] = class;
	}
	Py_XDECREF(errors);
	return PyErr_Occurred() ? -1 : 0;
}
