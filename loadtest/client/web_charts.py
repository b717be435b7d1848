"""Charts of TTFT, ITL, tokens/s and endings in locust's web page, by the extension points of its Flask app."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flask import Blueprint, Response, jsonify, request
from locust.web import WebUI

INTERVAL_SECONDS = 2.0  # of the charts, as of locust's own
_SCRIPT = Path(__file__).with_name("web_charts.js")


def add(web_ui: WebUI, rows: Callable[[], list[dict[str, Any]]]) -> None:
    """Add the charts below locust's page, and their data to its routes. `rows`: figures of a `Timeline` until now."""
    app: Any = web_ui.app
    options: Any = web_ui.environment.parsed_options
    charts = Blueprint("charts", __name__, url_prefix=options.web_base_path)

    @charts.route("/charts/rows")
    @web_ui.auth_required_if_enabled
    def send_rows() -> Response:
        return jsonify(rows())

    @charts.route("/charts.js")
    def send_script() -> Response:
        return Response(_SCRIPT.read_text(encoding="utf-8"), mimetype="text/javascript")

    @app.after_request
    def add_script(response: Response) -> Response:
        if request.endpoint == "locust.index" and response.status_code == 200:
            page = response.get_data(as_text=True)
            response.set_data(page.replace("</body>", '<script src="./charts.js" defer></script></body>'))
        return response

    app.register_blueprint(charts)
