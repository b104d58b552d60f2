"""The settings of a project of Django for the rows of `rows_of_django`."""

from shmq.integrations.django.api import PACKAGE

SECRET_KEY = "a secret of a test"
USE_TZ = True
INSTALLED_APPS = [*(["django_tasks"] if PACKAGE == "django_tasks" else [])]
INSTALLED_APPS += ["shmq.integrations.django"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
TASKS = {
    "default": {
        "BACKEND": "shmq.integrations.django.Backend",
        "OPTIONS": {"instance": "lifecycle"},
    }
}
