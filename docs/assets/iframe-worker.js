// Search where pages are opened from disk: browsers start no worker on file://, so that the worker
// of the theme's search runs in a hidden frame. The theme knows it by this class's name.
if (location.protocol === "file:") {
  window.IFrameWorker = class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      const script = new URL(url, location.href).href.replaceAll('"', "%22");
      frame.hidden = true;
      this.loaded = new Promise((done) => frame.addEventListener("load", done));
      frame.srcdoc =
        "<script>window.postMessage = (data) => frameElement.worker.answer(data);</" + "script>" +
        '<script src="' + script + '"></' + "script>";
      frame.worker = this;
      document.body.appendChild(frame);
      this.frame = frame;
    }
    answer(data) {
      this.dispatchEvent(new MessageEvent("message", { data }));
    }
    postMessage(data) {
      this.loaded.then(() => {
        const inside = this.frame.contentWindow;
        inside.dispatchEvent(new inside.MessageEvent("message", { data }));
      });
    }
  };
  window.Worker = window.IFrameWorker;
}
