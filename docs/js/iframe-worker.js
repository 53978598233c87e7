// Search without a server. A page from the file system may not start a Web Worker, so the search script runs in a
// hidden frame. The search script looks for the name IFrameWorker, and then loads its parts with an asynchronous
// importScripts.
if (location.protocol === "file:") {
  const load = (frame, url) =>
    new Promise((resolve, reject) => {
      const script = frame.document.createElement("script");
      script.src = url;
      script.onload = resolve;
      script.onerror = reject;
      frame.document.body.appendChild(script);
    });

  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const element = document.createElement("iframe");
      element.hidden = true;
      const there = new Promise((resolve) => element.addEventListener("load", resolve, { once: true }));
      document.body.appendChild(element);
      this.element = element;
      this.ready = there.then(async () => {
        const frame = element.contentWindow;
        frame.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        frame.importScripts = async (...urls) => {
          for (const one of urls) await load(frame, one);
        };
        await load(frame, url);
        return frame;
      });
    }

    postMessage(data) {
      this.ready.then((frame) => frame.dispatchEvent(new frame.MessageEvent("message", { data })));
    }

    terminate() {
      this.element.remove();
    }
  };
}
